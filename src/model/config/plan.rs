//! Owns `Plan`, a config resolved to numbers, and the one function that turns it into a graph over named tensors.

mod ahead;
mod experts;
mod mixers;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use safetensors::Dtype;

use crate::dtype::DType;
use crate::model::blocks::Blocks;
use crate::model::coded::Recipe;
use crate::model::config::quantised::{Parts, Quantisation};
use crate::model::config::reason::Reason;
use crate::model::graph::{
    Act, Attention, FeedForward, GatedDelta, Joined, Layer, Linear, Mixer, Mlp, ModelGraph, Norm, NormKind, QkNorm,
    QkNormSpan, QueryScale, Rope, RopeId, RowView, ScaledMlp, Tensor, TensorId,
};
use crate::model::weights::HeaderTensor;

pub use ahead::assemble_draft;
pub use experts::{Each, ExpertNames, ExpertsPlan, GateUp, SharedNames, SharedPlan, Stacked};
pub use mixers::{Block, ConvPlan, MambaPlan};

/// A decoder as numbers: a config with its family's defaults and layouts applied.
#[derive(Debug, Clone)]
pub struct Plan {
    pub class: &'static str,
    pub names: &'static Names,
    /// Where the checkpoint has the modules of `names`.
    pub prefix: Prefix,
    /// Tensors that are left alone.
    pub ignored: Vec<Ignored>,
    /// Whether the rows of each head of q and k are in pairs; see [`Blocks::paired`].
    pub paired: bool,
    pub vocab: u32,
    pub hidden: u32,
    pub intermediate: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub positions_max: u32,
    /// Notes for the user about the limits of this import.
    pub notes: Vec<String>,
    pub tied: bool,
    pub norm: NormPlan,
    pub qk_norm: Option<QkNormSpan>,
    pub qkv_bias: bool,
    pub o_bias: bool,
    /// Modules of a layer that gate the output of attention, and tensors of its sinks.
    pub attn_gate: Option<&'static str>,
    pub sinks: Option<&'static str>,
    /// Whether every projection of the MLP has a bias.
    pub mlp_bias: bool,
    pub act: Act,
    pub gated: bool,
    pub parallel: bool,
    pub embed_scale: f32,
    pub residual_scale: f32,
    pub logits_scale: f32,
    pub logits_softcap: Option<f32>,
    pub attn_scale: f32,
    pub attn_softcap: Option<f32>,
    pub ropes: Vec<Rope>,
    /// One per layer.
    pub layers: Vec<LayerPlan>,
    /// Layers without an MLP.
    pub experts: Option<ExpertsPlan>,
    pub ahead: Ahead,
    /// The layers that have a gated delta net in the place of attention.
    pub delta: Option<DeltaPlan>,
    /// The layers that have a short convolution in the place of attention.
    pub conv: Option<ConvPlan>,
    /// The layers that have Mamba-2, in the place of attention or beside it.
    pub mamba: Option<MambaPlan>,
    /// Where the parts of each layer are, if not under its own index.
    pub blocks: Option<Vec<Block>>,
    /// Factors of the gate and of the output of every MLP, if they are not 1.
    pub mlp_scales: Option<[f32; 2]>,
    /// Other names that norms of a layer may have in a checkpoint: the usual one, the other.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Whether the norms of q and k follow the rotation.
    pub norm_after_rope: bool,
    pub query_scale: Option<QueryScale>,
}

/// What predicts further tokens (MTP), beside the decoder. Its tensors are no part of the model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ahead {
    /// Layers after the last one.
    pub layers: u32,
    /// Begins the names of other tensors.
    pub prefix: Option<&'static str>,
    /// Whether what has these names is one layer in the form of [`Joined`](crate::model::graph::Joined).
    pub is_joined: bool,
}

/// The gated delta nets of a model; see [`GatedDelta`].
#[derive(Debug, Clone)]
pub struct DeltaPlan {
    /// By layer: whether it has one.
    pub layers: Vec<bool>,
    pub key_heads: u32,
    pub value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub kernel: u32,
    /// Of the norm of the output.
    pub norm_eps: f32,
    pub negative_eigenvalues: bool,
    pub names: &'static DeltaNames,
}

/// Tensor names of a layer with a gated delta net, as those of [`Names`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaNames {
    pub attn_norm: Option<&'static str>,
    pub attn_post_norm: Option<&'static str>,
    pub mlp_norm: Option<&'static str>,
    pub mlp_post_norm: Option<&'static str>,
    pub projections: DeltaProjections,
    /// Ways to store the taps: in one tensor, or in several one after another. The first where the files have none.
    pub conv: &'static [&'static [&'static str]],
    pub a_log: &'static str,
    pub dt_bias: &'static str,
    pub norm: &'static str,
    pub o: &'static str,
}

/// How the projections of a gated delta net lie in tensors.
#[derive(Debug, Clone, Copy)]
pub enum DeltaProjections {
    Each {
        q: &'static str,
        k: &'static str,
        v: &'static str,
        z: &'static str,
        b: &'static str,
        a: &'static str,
    },
    /// All rows of q, then k, then v in one tensor (Qwen3.5).
    Rows {
        qkv: &'static str,
        z: &'static str,
        b: &'static str,
        a: &'static str,
    },
    /// For each key head its rows of q, of k, of v and of z; and its rows of b and of a (Qwen3-Next).
    PerKeyHead {
        qkvz: &'static str,
        ba: &'static str,
    },
}

/// What stands before the names of a family in its checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// In the place of `model.`.
    pub model: &'static str,
    /// Before other names: the head's.
    pub head: &'static str,
}

impl Prefix {
    /// The names as they are.
    pub const NONE: Prefix = Prefix { model: "model.", head: "" };

    /// The name of a tensor or module as the checkpoint has it.
    pub fn of(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", self.model),
            None => format!("{}{name}", self.head),
        }
    }
}

/// Tensors of a checkpoint that take no part in computing text, by the beginning of their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ignored {
    pub prefix: &'static str,
    pub what: &'static str,
}

/// Properties that differ from layer to layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerPlan {
    pub rope: Option<RopeId>,
    pub window: Option<u32>,
}

/// Every norm of a model but its q and k norms' span.
#[derive(Debug, Clone, Copy)]
pub struct NormPlan {
    pub kind: NormKind,
    pub eps: f32,
    pub weight_offset: f32,
    pub bias: bool,
}

/// Tensor names of a family. Norms and projections are named without `.weight`, those of a layer under
/// `{layers}.{index}.`.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    pub embed: &'static str,
    pub layers: &'static str,
    pub final_norm: &'static str,
    /// Names the head may have; the first where the files have none.
    pub heads: &'static [&'static str],
    pub attn_norm: Option<&'static str>,
    pub attn_post_norm: Option<&'static str>,
    pub mlp_norm: Option<&'static str>,
    pub mlp_post_norm: Option<&'static str>,
    pub projections: Projections,
    pub o: &'static str,
    /// With [`HEAD`] in it there is a tensor for each head.
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    /// `None` in a gated MLP: `up` holds the rows of gate, then those of up (Phi-3).
    pub gate: Option<&'static str>,
    pub up: &'static str,
    pub down: &'static str,
}

/// Stands for the index of a head in the names of q and k norms.
pub const HEAD: &str = "{head}";

/// How q, k and v lie in tensors.
#[derive(Debug, Clone, Copy)]
pub enum Projections {
    Separate {
        q: &'static str,
        k: &'static str,
        v: &'static str,
    },
    /// For each head the rows of q, then those of the output gate, in the tensor of q (Qwen3.5).
    GatedQuery {
        q: &'static str,
        k: &'static str,
        v: &'static str,
    },
    /// All rows of q, then k, then v (Phi-3).
    Rows {
        qkv: &'static str,
    },
    /// For each head its q, k and v rows (GPT-NeoX); as many key as query heads.
    PerHead {
        qkv: &'static str,
    },
}

/// The tensors a graph reads, checked against the files where there are any.
struct Collector<'a> {
    /// `None` for a synthetic model, which has every tensor.
    files: Option<&'a BTreeMap<String, HeaderTensor>>,
    quantisation: Option<&'a Quantisation>,
    recipes: BTreeMap<TensorId, Recipe>,
    /// Stacked matrices that the files have transposed.
    transposed: BTreeSet<TensorId>,
    /// Tensors of a GGUF file that are not read as they lie.
    blocks: BTreeMap<TensorId, Blocks>,
    /// Width of a head, where the rows of q and k are in pairs.
    paired: Option<u32>,
    /// Tensors that recipes are made of.
    parts: BTreeSet<String>,
    tensors: Vec<Tensor>,
    ids: HashMap<String, TensorId>,
    reasons: Vec<Reason>,
}

impl Collector<'_> {
    /// The id of a tensor, which has to be there with this shape; asked for twice it is the same tensor.
    fn want(&mut self, name: String, shape: &[u32]) -> TensorId {
        self.want_as(name, shape, shape)
    }

    /// As [`want`](Self::want), for a tensor that the files have in the shape `stored`.
    fn want_as(&mut self, name: String, shape: &[u32], stored: &[u32]) -> TensorId {
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        let dtype = match self.files {
            None => DType::Bf16, // Synthetic values are exact in bf16.
            Some(files) => self.check(files.get(&name), &name, stored),
        };
        let id = TensorId::from(self.tensors.len());
        if let Some(blocks) = self.blocks_of(&name, shape) {
            self.blocks.insert(id, blocks);
        }
        self.ids.insert(name.clone(), id);
        self.tensors.push(Tensor { name, dtype, shape: shape.to_vec() });
        id
    }

    /// How a tensor of a GGUF file is read; `None`: as it lies.
    fn blocks_of(&self, name: &str, shape: &[u32]) -> Option<Blocks> {
        let found = self.files?.get(name)?;
        let kind = found.kind?;
        let paired = self.paired.filter(|_| [".attn_q.", ".attn_k."].iter().any(|part| name.contains(part)));
        if kind.block() == 1 && paired.is_none() {
            return None;
        }
        let (rows, cols) = match *shape {
            [ref rows @ .., cols] => (rows.iter().product(), cols),
            [] => return None,
        };
        Some(Blocks { kind, component: found.component(), rows, cols, paired, as_values: false })
    }

    /// The id of the weights of a linear: stored as values, or made of several tensors.
    fn matrix(&mut self, module: &str, is_head: bool, rows: u32, cols: u32) -> TensorId {
        let name = format!("{module}.weight");
        let scheme = self.quantisation.and_then(|quantisation| quantisation.scheme(module, is_head));
        let (Some(scheme), Some(files)) = (scheme, self.files) else { return self.want(name, &[rows, cols]) };
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        let id = TensorId::from(self.tensors.len());
        let mut parts = Parts { files, used: &mut self.parts, reasons: &mut self.reasons };
        if let Some(recipe) = parts.recipe(module, scheme, rows, cols) {
            self.recipes.insert(id, recipe);
        }
        self.ids.insert(name.clone(), id);
        self.tensors.push(Tensor { name, dtype: DType::F32, shape: vec![rows, cols] });
        id
    }

    fn check(&mut self, found: Option<&HeaderTensor>, name: &str, shape: &[u32]) -> DType {
        let Some(found) = found else {
            self.reasons.push(Reason::MissingTensor { name: name.to_string(), shape: shape.to_vec() });
            return DType::Bf16;
        };
        if !found.shape.iter().map(|&n| n as u64).eq(shape.iter().map(|&n| u64::from(n))) {
            let (expected, found) = (shape.to_vec(), found.shape.clone());
            self.reasons.push(Reason::TensorShape { name: name.to_string(), expected, found });
        }
        match found.dtype {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::Bf16,
            Dtype::F16 => DType::F16,
            other => {
                self.reasons.push(Reason::TensorDType { name: name.to_string(), found: format!("{other:?}") });
                DType::Bf16
            }
        }
    }

    /// The id of a tensor of one value, of rank 0 or 1.
    fn single(&mut self, name: String) -> TensorId {
        let rank = self.files.and_then(|files| files.get(&name)).map_or(1, |found| found.shape.len());
        self.want(name, if rank == 0 { &[] } else { &[1] })
    }

    fn norm(&mut self, name: &str, plan: NormPlan, width: u32) -> Norm {
        let weight = Some(self.want(format!("{name}.weight"), &[width]));
        let bias = plan.bias.then(|| self.want(format!("{name}.bias"), &[width]));
        Norm { kind: plan.kind, eps: plan.eps, weight, weight_offset: plan.weight_offset, bias }
    }

    /// A linear that is `rows` rows of a tensor of `rows_total`, where `view` places them.
    fn linear(&mut self, name: &str, placed: Placed, rows: u32, cols: u32, bias: bool) -> Linear {
        let Placed { rows_total, first, block, stride } = placed;
        let weight = self.matrix(name, false, rows_total, cols);
        let bias = bias.then(|| self.want(format!("{name}.bias"), &[rows_total]));
        let view = |tensor| RowView { tensor, first, block, stride };
        Linear { weight: view(weight), bias: bias.map(view), rows, cols }
    }

    /// The tensors of the taps of `channels` channels. In the files they have a second extent of 1, as a convolution of torch has.
    fn taps(&mut self, path: impl Fn(&str) -> String, ways: &[&[&str]], parts: &[u32], kernel: u32) -> Vec<TensorId> {
        let named = |names: &[&str]| names.iter().map(|name| path(name)).collect::<Vec<String>>();
        let there = |names: &&&[&str]| {
            let files = self.files.into_iter();
            files.flat_map(|files| named(names).into_iter().map(|name| files.contains_key(&name))).any(|there| there)
        };
        let names = named(ways.iter().find(there).unwrap_or(&ways[0]));
        let channels: u32 = parts.iter().sum();
        let rows = |name: &String| {
            let shape = &self.files?.get(name)?.shape;
            let [rows, 1, taps] = shape[..] else { return None };
            u32::try_from(rows).ok().filter(|_| taps as u64 == u64::from(kernel))
        };
        let stored: Option<Vec<u32>> = names.iter().map(rows).collect();
        let whole = |rows: &Vec<u32>| rows.iter().map(|&rows| u64::from(rows)).sum::<u64>() == u64::from(channels);
        let expected = if names.len() == parts.len() { parts.to_vec() } else { vec![channels] };
        let rows = stored.filter(whole).unwrap_or(expected);
        let of = |(name, rows): (String, u32)| self.want_as(name, &[rows, kernel], &[rows, 1, kernel]);
        names.into_iter().zip(rows).map(of).collect()
    }

    fn whole(&mut self, name: &str, rows: u32, cols: u32, bias: bool) -> Linear {
        self.linear(name, Placed::range(rows, 0), rows, cols, bias)
    }
}

/// Where the rows of a linear lie in its tensor; see [`RowView`].
struct Placed {
    rows_total: u32,
    first: u32,
    block: u32,
    stride: u32,
}

impl Placed {
    fn range(rows_total: u32, first: u32) -> Self {
        Placed { rows_total, first, block: 1, stride: 1 }
    }
}

/// The outcome of assembling: a graph to trust if `reasons` is empty.
pub struct Assembled {
    pub graph: ModelGraph,
    /// Names in `graph.tensors`, and of what its matrices are made of.
    pub consumed: BTreeSet<String>,
    /// How matrices are made of several tensors.
    pub recipes: BTreeMap<TensorId, Recipe>,
    /// How tensors of a GGUF file are read, where it is not as they lie.
    pub blocks: BTreeMap<TensorId, Blocks>,
    /// Stacked matrices that the files have transposed.
    pub transposed: BTreeSet<TensorId>,
    pub reasons: Vec<Reason>,
}

/// The graph of a plan over the tensors of `files`; without files, over tensors of the right shape.
///
/// Tensors get their ids in the order of computation. `eos` and `bos` are left empty.
pub fn assemble(
    plan: &Plan,
    files: Option<&BTreeMap<String, HeaderTensor>>,
    quantisation: Option<&Quantisation>,
) -> Assembled {
    let mut c = Collector::new(plan, files, quantisation);
    let embed = c.want(plan.prefix.of(plan.names.embed), &[plan.vocab, plan.hidden]);
    let layers = (0..plan.layers.len()).map(|layer| assemble_layer(&mut c, plan, layer)).collect();
    let final_norm = c.norm(&plan.prefix.of(plan.names.final_norm), plan.norm, plan.hidden);
    let head = c.head(plan, embed);
    c.finish(plan, Assembly { embed, joined: None, layers, final_norm, head })
}

/// What a graph is assembled of.
struct Assembly {
    embed: TensorId,
    joined: Option<Box<Joined>>,
    layers: Vec<Layer>,
    final_norm: Norm,
    head: TensorId,
}

impl<'a> Collector<'a> {
    fn new(
        plan: &Plan,
        files: Option<&'a BTreeMap<String, HeaderTensor>>,
        quantisation: Option<&'a Quantisation>,
    ) -> Collector<'a> {
        Collector {
            files,
            quantisation,
            recipes: BTreeMap::new(),
            transposed: BTreeSet::new(),
            blocks: BTreeMap::new(),
            paired: plan.paired.then_some(plan.head_dim),
            parts: BTreeSet::new(),
            tensors: Vec::new(),
            ids: HashMap::new(),
            reasons: Vec::new(),
        }
    }

    /// The matrix of the head: the embedding, where it is tied.
    fn head(&mut self, plan: &Plan, embed: TensorId) -> TensorId {
        if plan.tied {
            return embed;
        }
        let heads: Vec<String> = plan.names.heads.iter().map(|name| plan.prefix.of(name)).collect();
        let there = |name: &&String| self.files.is_some_and(|files| files.contains_key(*name));
        let name = heads.iter().find(there).unwrap_or(&heads[0]);
        let module = name.strip_suffix(".weight").unwrap_or(name);
        self.matrix(module, true, plan.vocab, plan.hidden)
    }

    fn finish(self, plan: &Plan, assembly: Assembly) -> Assembled {
        let c = self;
        let Assembly { embed, joined, layers, final_norm, head } = assembly;
        let mut graph = ModelGraph {
            family: plan.class.to_string(),
            hidden: plan.hidden,
            vocab: plan.vocab,
            positions_max: plan.positions_max,
            embed,
            embed_scale: plan.embed_scale,
            joined,
            ropes: plan.ropes.clone(),
            layers,
            final_norm,
            head: Linear { weight: RowView::range(head, 0), bias: None, rows: plan.vocab, cols: plan.hidden },
            logits_scale: plan.logits_scale,
            logits_softcap: plan.logits_softcap,
            eos: Vec::new(),
            bos: None,
            tensors: c.tensors,
            formats: c.recipes.iter().map(|(&id, recipe)| (id, recipe.format)).collect(),
        };
        // The name of a matrix may be that of one of its parts, or of no tensor.
        let whole = c.ids.into_iter().filter(|(_, id)| !c.recipes.contains_key(id)).map(|(name, _)| name);
        let consumed = whole.chain(c.parts).collect();
        let mut blocks = c.blocks;
        as_one_matrix(&graph, &mut blocks);
        graph.formats.extend(blocks.iter().filter_map(|(&id, blocks)| Some((id, blocks.format()?))));
        Assembled { graph, consumed, recipes: c.recipes, blocks, transposed: c.transposed, reasons: c.reasons }
    }
}

/// Parts of a matrix that is streamed as one (q, k, v and the gate of attention; gate and up) are packed as values where a file stores them in different types.
fn as_one_matrix(graph: &ModelGraph, blocks: &mut BTreeMap<TensorId, Blocks>) {
    for layer in &graph.layers {
        let gated = layer.feed.mlps().map(|mlp| mlp.gate.iter().chain([&mlp.up]).collect());
        for parts in gated.chain(layer.attention().map(|attn| attn.projections())) {
            let of = |linear: &&Linear| blocks.get(&linear.weight.tensor).and_then(Blocks::format);
            if parts.iter().any(|linear| of(linear) != of(&parts[0])) {
                for linear in parts {
                    if let Some(blocks) = blocks.get_mut(&linear.weight.tensor) {
                        blocks.as_values = true;
                    }
                }
            }
        }
    }
}

/// The gated delta net of a layer, whose tensors have their names by `path`.
fn assemble_delta(c: &mut Collector, plan: &Plan, delta: &DeltaPlan, path: &dyn Fn(&str) -> String) -> GatedDelta {
    let DeltaPlan { key_heads, value_heads, key_dim, value_dim, kernel, norm_eps, negative_eigenvalues, names, .. } =
        *delta;
    let (keys, values, hidden) = (key_heads * key_dim, value_heads * value_dim, plan.hidden);
    let [q, k, v, z, b, a] = match names.projections {
        DeltaProjections::Each { q, k, v, z, b, a } => {
            let sizes = [(q, keys), (k, keys), (v, values), (z, values), (b, value_heads), (a, value_heads)];
            sizes.map(|(name, rows)| c.whole(&path(name), rows, hidden, false))
        }
        DeltaProjections::Rows { qkv, z, b, a } => {
            let mut part =
                |first, rows| c.linear(&path(qkv), Placed::range(2 * keys + values, first), rows, hidden, false);
            let [q, k, v] = [(0, keys), (keys, keys), (2 * keys, values)].map(|(first, rows)| part(first, rows));
            let [z, b, a] = [(z, values), (b, value_heads), (a, value_heads)]
                .map(|(name, rows)| c.whole(&path(name), rows, hidden, false));
            [q, k, v, z, b, a]
        }
        DeltaProjections::PerKeyHead { qkvz, ba } => {
            let group = value_heads / key_heads;
            // Rows that each key head has in a tensor of `stride` for each: from `first` on, `block`.
            let mut part = |name, stride, first, block| {
                let placed = Placed { rows_total: key_heads * stride, first, block, stride };
                c.linear(&path(name), placed, key_heads * block, hidden, false)
            };
            let wide = group * value_dim;
            let all = 2 * key_dim + 2 * wide;
            [
                part(qkvz, all, 0, key_dim),
                part(qkvz, all, key_dim, key_dim),
                part(qkvz, all, 2 * key_dim, wide),
                part(qkvz, all, 2 * key_dim + wide, wide),
                part(ba, 2 * group, 0, group),
                part(ba, 2 * group, group, group),
            ]
        }
    };
    let conv = c.taps(path, names.conv, &[keys, keys, values], kernel);
    let a_log = c.want(path(names.a_log), &[value_heads]);
    let dt_bias = c.want(path(names.dt_bias), &[value_heads]);
    let gated = NormPlan { kind: NormKind::Rms, eps: norm_eps, weight_offset: 0.0, bias: false };
    let norm = c.norm(&path(names.norm), gated, value_dim);
    let o = c.whole(&path(names.o), hidden, values, false);
    GatedDelta {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel,
        q,
        k,
        v,
        z,
        b,
        a,
        conv,
        a_log,
        dt_bias,
        norm,
        negative_eigenvalues,
        o,
    }
}

/// A norm of a layer, under its name or the other one that the plan knows for it.
fn layer_norm(c: &mut Collector, plan: &Plan, path: &dyn Fn(&str) -> String, name: Option<&str>) -> Option<Norm> {
    let there = |name: &&str| c.files.is_some_and(|files| files.contains_key(&format!("{}.weight", path(name))));
    let name = name?;
    let other = plan.aliases.iter().find(|(usual, _)| *usual == name).map(|(_, other)| *other);
    let name = other.filter(there).unwrap_or(name);
    Some(c.norm(&path(name), plan.norm, plan.hidden))
}

/// What follows the mixer of a layer.
fn assemble_feed(c: &mut Collector, plan: &Plan, layer: usize, path: &dyn Fn(&str) -> String) -> FeedForward {
    match (&plan.experts, plan.mlp_scales) {
        (Some(experts), _) if experts.layers[layer] => {
            FeedForward::Experts(Box::new(experts::assemble(c, plan, experts, path)))
        }
        (_, None) => FeedForward::Dense(assemble_mlp(c, plan, path)),
        (_, Some([gate_scale, down_scale])) => {
            FeedForward::Scaled(Box::new(ScaledMlp { mlp: assemble_mlp(c, plan, path), gate_scale, down_scale }))
        }
    }
}

fn assemble_layer(c: &mut Collector, plan: &Plan, layer: usize) -> Layer {
    let (names, layers) = (plan.names, plan.prefix.of(plan.names.layers));
    let delta = plan.delta.as_ref().filter(|delta| delta.layers[layer]);
    let [attn_norm, attn_post_norm, mlp_norm, mlp_post_norm] = match delta.map(|delta| delta.names) {
        Some(names) => [names.attn_norm, names.attn_post_norm, names.mlp_norm, names.mlp_post_norm],
        None => [names.attn_norm, names.attn_post_norm, names.mlp_norm, names.mlp_post_norm],
    };
    let own = Block { mixer: layer as u32, feed: Some(layer as u32) };
    let block = plan.blocks.as_ref().map_or(own, |blocks| blocks[layer]);
    let path = |name: &str| format!("{layers}.{}.{name}", block.mixer);
    let attn_norm = layer_norm(c, plan, &path, attn_norm);
    let mixer = match delta {
        Some(delta) => Mixer::GatedDelta(Box::new(assemble_delta(c, plan, delta, &path))),
        None => mixers::assemble(c, plan, layer, &path),
    };
    let attn_post_norm = layer_norm(c, plan, &path, attn_post_norm);
    let (mlp_norm, feed, mlp_post_norm) = match block.feed {
        None => (None, FeedForward::None, None),
        Some(feed) => {
            let path = |name: &str| format!("{layers}.{feed}.{name}");
            let mlp_norm = layer_norm(c, plan, &path, mlp_norm);
            let feed = assemble_feed(c, plan, layer, &path);
            (mlp_norm, feed, layer_norm(c, plan, &path, mlp_post_norm))
        }
    };
    Layer {
        attn_norm,
        mixer,
        attn_post_norm,
        mlp_norm,
        feed,
        mlp_post_norm,
        parallel: plan.parallel,
        residual_scale: plan.residual_scale,
    }
}

/// The attention of a layer, whose tensors have their names by `path`.
fn assemble_attention(c: &mut Collector, plan: &Plan, layer: usize, path: &dyn Fn(&str) -> String) -> Attention {
    let (names, LayerPlan { rope, window }) = (plan.names, plan.layers[layer]);
    let (hidden, head_dim) = (plan.hidden, plan.head_dim);
    let (q_rows, kv_rows) = (plan.heads * head_dim, plan.kv_heads * head_dim);
    let mut gate = None;
    let (q, k, v) = match names.projections {
        Projections::Separate { q, k, v } => (
            c.whole(&path(q), q_rows, hidden, plan.qkv_bias),
            c.whole(&path(k), kv_rows, hidden, plan.qkv_bias),
            c.whole(&path(v), kv_rows, hidden, plan.qkv_bias),
        ),
        Projections::GatedQuery { q, k, v } => {
            let mut part = |first| {
                let placed = Placed { rows_total: 2 * q_rows, first, block: head_dim, stride: 2 * head_dim };
                c.linear(&path(q), placed, q_rows, hidden, plan.qkv_bias)
            };
            let query = part(0);
            gate = Some(part(head_dim));
            (
                query,
                c.whole(&path(k), kv_rows, hidden, plan.qkv_bias),
                c.whole(&path(v), kv_rows, hidden, plan.qkv_bias),
            )
        }
        Projections::Rows { qkv } => {
            let rows_total = q_rows + 2 * kv_rows;
            let mut part =
                |first, rows| c.linear(&path(qkv), Placed::range(rows_total, first), rows, hidden, plan.qkv_bias);
            (part(0, q_rows), part(q_rows, kv_rows), part(q_rows + kv_rows, kv_rows))
        }
        Projections::PerHead { qkv } => {
            let mut part = |index: u32| {
                let first = index * head_dim;
                let placed = Placed { rows_total: 3 * q_rows, first, block: head_dim, stride: 3 * head_dim };
                c.linear(&path(qkv), placed, q_rows, hidden, plan.qkv_bias)
            };
            (part(0), part(1), part(2))
        }
    };
    let mut qk_norm = |name: &str, rows: u32| {
        plan.qk_norm.map(|span| {
            let (heads, NormPlan { kind, eps, weight_offset, .. }) = (rows / head_dim, plan.norm);
            let named = |head: u32| format!("{}.weight", path(name).replace(HEAD, &head.to_string()));
            let weights = match span {
                QkNormSpan::OwnGains if name.contains(HEAD) => {
                    (0..heads).map(|head| c.want(named(head), &[head_dim])).collect()
                }
                QkNormSpan::OwnGains => vec![c.want(named(0), &[heads, head_dim])],
                QkNormSpan::Head | QkNormSpan::Projection => vec![c.want(named(0), &[span.gains(heads, head_dim)])],
            };
            QkNorm { kind, eps, weights, weight_offset, span }
        })
    };
    let (q_norm, k_norm) = (qk_norm(names.q_norm, q_rows), qk_norm(names.k_norm, kv_rows));
    let attn_gate = plan.attn_gate.map(|name| c.whole(&path(name), q_rows, hidden, false));
    let sinks = plan.sinks.map(|name| c.want(path(name), &[plan.heads]));
    let o = c.whole(&path(names.o), hidden, q_rows, plan.o_bias);
    let scaled = c.quantisation.is_some_and(|quantisation| quantisation.cache_scales);
    // Beside the projections: `self_attn.k_scale`. ModelOpt writes them below the projections: `self_attn.k_proj.k_scale`.
    let attention = names.o.rsplit_once('.').map_or("", |(module, _)| module);
    let (k_module, v_module) = match names.projections {
        Projections::Separate { k, v, .. } | Projections::GatedQuery { k, v, .. } => (k, v),
        Projections::Rows { qkv } | Projections::PerHead { qkv } => (qkv, qkv),
    };
    let cache_scales = scaled.then(|| {
        [("k_scale", k_module), ("v_scale", v_module)].map(|(name, module)| {
            let below = path(&format!("{module}.{name}"));
            let is_below = c.files.is_some_and(|files| files.contains_key(&below));
            c.single(if is_below { below } else { path(&format!("{attention}.{name}")) })
        })
    });
    Attention {
        heads: plan.heads,
        kv_heads: plan.kv_heads,
        head_dim,
        q,
        k,
        v,
        o,
        q_norm,
        k_norm,
        rope,
        scale: plan.attn_scale,
        softcap: plan.attn_softcap,
        window,
        cache_scales,
        sinks,
        gate: gate.or(attn_gate),
        query_scale: plan.query_scale,
        norm_after_rope: plan.norm_after_rope,
    }
}

fn assemble_mlp(c: &mut Collector, plan: &Plan, path: &dyn Fn(&str) -> String) -> Mlp {
    let (names, hidden, intermediate) = (plan.names, plan.hidden, plan.intermediate);
    let (gate, up) = match (plan.gated, names.gate) {
        (false, _) => (None, c.whole(&path(names.up), intermediate, hidden, plan.mlp_bias)),
        (true, Some(gate)) => (
            Some(c.whole(&path(gate), intermediate, hidden, plan.mlp_bias)),
            c.whole(&path(names.up), intermediate, hidden, plan.mlp_bias),
        ),
        (true, None) => {
            let mut part = |first| {
                let placed = Placed::range(2 * intermediate, first);
                c.linear(&path(names.up), placed, intermediate, hidden, plan.mlp_bias)
            };
            (Some(part(0)), part(intermediate))
        }
    };
    let down = c.whole(&path(names.down), hidden, intermediate, plan.mlp_bias);
    Mlp { act: plan.act, gate, up, down, swiglu: None }
}
