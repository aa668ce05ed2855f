//! Owns `ModelGraph`: a decoder as ops over named checkpoint tensors; no tiles, no hardware.
//!
//! The vocabulary is closed. A layer is data in this algebra, and lowering is one function over it, so a new family is
//! an importer that fills these fields, never a lowering of its own:
//!
//! ```text
//! x  = embed[token] * embed_scale, of a draft what `Joined` makes of it
//! per layer:
//!   a  = mixer(norm?(x));      a = norm?(a)
//!   sequential:  x = x + residual_scale * a ;  m = feed(norm?(x))
//!   parallel:    m = feed(norm?(x))         ;  x = x + residual_scale * a
//!   m = norm?(m);  x = x + residual_scale * m
//! logits = softcap?(logits_scale * head(norm(x)))
//!
//! feed(x), none:     no m: the layer ends after its mixer
//! feed(x), dense:    mlp(x)
//! feed(x), scaled:   down_scale * down(act(gate_scale * gate(x)) * up(x))
//! feed(x), experts:  sum over the chosen experts e, in the order of their choice, of weight_e * mlp_e(x)
//!                    + sigmoid?(gate(x)) * scale * shared(x)
//! ```

use crate::define_id;
use crate::dtype::DType;
use crate::format::Format;
use std::collections::BTreeMap;

define_id!(
    /// A tensor of the checkpoint.
    TensorId, "w"
);
define_id!(
    /// A rotary table; layers of one model may use different ones (Gemma 3).
    RopeId, "r"
);

/// A decoder-only model, ready to be lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelGraph {
    /// Class name in the checkpoint's `architectures`, e.g. `LlamaForCausalLM`. Informative only.
    pub family: String,
    pub hidden: u32,
    pub vocab: u32,
    /// Largest number of positions the checkpoint declares valid; `context_max` may not exceed it.
    pub positions_max: u32,
    /// Every tensor of the checkpoint that the model reads, in id order.
    pub tensors: Vec<Tensor>,
    /// Matrices that are stored as codes and scales. The others are values of the type of their tensor.
    pub formats: BTreeMap<TensorId, Format>,
    /// Embedding table `[vocab, hidden]`.
    pub embed: TensorId,
    /// Multiplies the embedding row (Gemma: sqrt(hidden), rounded as transformers rounds it; Granite).
    pub embed_scale: f32,
    /// Of a draft: what it makes of the embedding row and of another model's output, in the place of the first layer's input.
    pub joined: Option<Box<Joined>>,
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    /// `[vocab, hidden]`; its weight is `embed` where the checkpoint ties them.
    pub head: Linear,
    /// Multiplies the logits (Granite: 1 / logits_scaling; Cohere: logit_scale).
    pub logits_scale: f32,
    /// `cap * tanh(logits / cap)`, after the scale.
    pub logits_softcap: Option<f32>,
    /// Token ids that end generation, from generation_config.json or config.json; ascending, may be empty.
    pub eos: Vec<u32>,
    /// Id that starts a text, where the checkpoint names one.
    pub bos: Option<u32>,
}

/// How a draft begins that predicts the token after the next one (MTP of Qwen3-Next and Qwen3.5), at a position `i`:
///
/// `x = of_embedding(embedding_norm(embed[token i + 1] * embed_scale)) + of_given(given_norm(given))`
///
/// `given` is what the final norm of the model leaves at position `i`. For a token further on it is what the final norm of the draft leaves at the
/// position before. The formula is that of `Qwen3NextMultiTokenPredictor` in vLLM.
#[derive(Debug, Clone, PartialEq)]
pub struct Joined {
    pub embedding_norm: Norm,
    pub given_norm: Norm,
    /// `[hidden, hidden]`, as `of_given`: the two halves of one matrix, the left one and the right one. The rows of the tensor are halves of the
    /// checkpoint's rows, so each has every second row.
    pub of_embedding: Linear,
    pub of_given: Linear,
}

/// A checkpoint tensor as its header declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub dtype: DType,
    /// `[out]`, `[out, in]`, `[experts, out, in]` of stacked experts, none of a single value.
    pub shape: Vec<u32>,
}

impl Tensor {
    /// Values in it.
    pub fn count(&self) -> u64 {
        self.shape.iter().map(|&n| u64::from(n)).product()
    }
}

/// `y = W x + b`, `W` of shape `[rows, cols]` in the `[out, in]` convention.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    pub weight: RowView,
    /// One value per output row.
    pub bias: Option<RowView>,
    pub rows: u32,
    pub cols: u32,
}

/// Output rows of a linear, as rows of a checkpoint tensor; fused tensors (Phi-3 qkv, GPT-NeoX qkv) are views.
#[derive(Debug, Clone, PartialEq)]
pub struct RowView {
    pub tensor: TensorId,
    /// Row `i` of the view is row `first + (i / block) * stride + i % block` of the tensor.
    /// A plain range has `block == stride`. GPT-NeoX interleaves q, k, v per head: `block = head_dim`, `stride = 3 * head_dim`.
    pub first: u32,
    pub block: u32,
    pub stride: u32,
}

impl RowView {
    /// Rows `first..` of the tensor, in order.
    pub fn range(tensor: TensorId, first: u32) -> Self {
        RowView { tensor, first, block: 1, stride: 1 }
    }

    /// The tensor row of row `i` of the view.
    pub fn row(&self, i: u32) -> u32 {
        self.first + (i / self.block) * self.stride + i % self.block
    }
}

/// Normalisation over the last axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    pub kind: NormKind,
    pub eps: f32,
    /// `[width]`; absent where the family normalises without a gain (OLMo 1, not imported yet).
    pub weight: Option<TensorId>,
    /// Added to the weight before use: 1.0 for Gemma's `(1 + w)`, else 0.0.
    pub weight_offset: f32,
    /// `[width]`, LayerNorm only.
    pub bias: Option<TensorId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `x * rsqrt(mean(x^2) + eps) * w`
    Rms,
    /// `(x - mean(x)) * rsqrt(var(x) + eps) * w + b`
    Layer,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Before the mixer.
    pub attn_norm: Option<Norm>,
    pub mixer: Mixer,
    /// Over the mixer's output, before the residual sum (Gemma 2 and 3, OLMo 2).
    pub attn_post_norm: Option<Norm>,
    /// Before what follows attention, experts included.
    pub mlp_norm: Option<Norm>,
    pub feed: FeedForward,
    /// Over the output of what follows attention, before the residual sum.
    pub mlp_post_norm: Option<Norm>,
    /// Both branches read the layer's input (GPT-NeoX, Cohere).
    pub parallel: bool,
    /// Multiplies each branch before it is added (Granite).
    pub residual_scale: f32,
}

impl Layer {
    /// Its attention, if it is the whole mixer; `None` if positions meet in another way, or in others beside it.
    pub fn attention(&self) -> Option<&Attention> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::GatedDelta(_) | Mixer::ShortConv(_) | Mixer::Mamba2(_) | Mixer::SideBySide(_) => None,
        }
    }

    /// The attention that keeps a history of keys and values, alone or beside another mixer.
    pub fn history(&self) -> Option<&Attention> {
        match &self.mixer {
            Mixer::SideBySide(both) => Some(&both.attention),
            _ => self.attention(),
        }
    }

    /// As [`history`](Self::history).
    pub fn attention_mut(&mut self) -> Option<&mut Attention> {
        match &mut self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::SideBySide(both) => Some(&mut both.attention),
            Mixer::GatedDelta(_) | Mixer::ShortConv(_) | Mixer::Mamba2(_) => None,
        }
    }

    /// Its Mamba-2 part, alone or beside attention.
    pub fn mamba(&self) -> Option<&Mamba2> {
        match &self.mixer {
            Mixer::Mamba2(mamba) => Some(mamba),
            Mixer::SideBySide(both) => Some(&both.mamba),
            Mixer::Attention(_) | Mixer::GatedDelta(_) | Mixer::ShortConv(_) => None,
        }
    }

    /// Its matrices: those of [`Mixer::linears`], then those of [`FeedForward::linears`].
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.mixer.linears().into_iter().chain(self.feed.linears())
    }
}

/// How positions meet in a layer: each reads what earlier ones left.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "most layers have attention")]
pub enum Mixer {
    /// A history of keys and values.
    Attention(Attention),
    /// A state of one size for every length of text, as all that follow have.
    GatedDelta(Box<GatedDelta>),
    ShortConv(Box<ShortConv>),
    Mamba2(Box<Mamba2>),
    /// A history and a state.
    SideBySide(Box<SideBySide>),
}

impl Mixer {
    /// Its matrices: those that read the layer's input, in the order of its doc, then o; attention before what is beside it.
    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Mixer::Attention(attention) => attention.projections().into_iter().chain([&attention.o]).collect(),
            Mixer::GatedDelta(net) => net.projections().into_iter().chain([&net.o]).collect(),
            Mixer::ShortConv(conv) => conv.projections().into_iter().chain([&conv.o]).collect(),
            Mixer::Mamba2(mamba) => mamba.linears(),
            Mixer::SideBySide(both) => {
                let attention = both.attention.projections().into_iter().chain([&both.attention.o]);
                attention.chain(both.mamba.linears()).collect()
            }
        }
    }

    /// What it is, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Mixer::Attention(_) => "attention",
            Mixer::GatedDelta(_) => "a gated delta net",
            Mixer::ShortConv(_) => "a short convolution",
            Mixer::Mamba2(_) => "Mamba-2",
            Mixer::SideBySide(_) => "attention and Mamba-2 side by side",
        }
    }
}

/// A layer of a gated delta net (Qwen3-Next, Qwen3.5, OLMo-Hybrid), after Yang et al. 2024 (arXiv 2412.06464).
///
/// The state of a sequence is a matrix `S` `[key_dim, value_dim]` for each value head, and the last `kernel - 1` inputs of the
/// convolution; zeros before the first position. Value head `h` has the query and key of head `h / (value_heads / key_heads)`.
///
/// ```text
/// u          = [q(x); k(x); v(x)]                                  one channel after another
/// [q; k; v]  = silu(sum over taps i of conv[:, i] * u at position - (kernel - 1 - i))
/// q          = q / sqrt(|q|^2 + 1e-6) / sqrt(key_dim),  k = k / sqrt(|k|^2 + 1e-6)     head by head
/// beta       = sigmoid(b(x)) * (2 if negative_eigenvalues)         one for each value head, as the decay
/// decay      = exp(-exp(a_log) * softplus(a(x) + dt_bias))
/// S          = decay * S
/// S          = S + k (beta * (v - S^T k))^T
/// y          = norm(S^T q) * silu(z(x))                            head by head
/// output     = o(y)
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GatedDelta {
    pub key_heads: u32,
    /// A multiple of `key_heads`.
    pub value_heads: u32,
    /// Width of a head of q and k.
    pub key_dim: u32,
    /// Width of a head of v, z and the output.
    pub value_dim: u32,
    /// Taps of the convolution, the current position's included.
    pub kernel: u32,
    /// `[key_heads * key_dim, hidden]`
    pub q: Linear,
    pub k: Linear,
    /// `[value_heads * value_dim, hidden]`
    pub v: Linear,
    /// The gate of the output, as `v`.
    pub z: Linear,
    /// `[value_heads, hidden]`, as `a`.
    pub b: Linear,
    pub a: Linear,
    /// Taps of the channels of q, k and v in turn, oldest first: the rows `[channels, kernel]` of these tensors, one after another. Where
    /// tensors end says nothing: a checkpoint of OLMo-Hybrid that transformers 5 wrote has thirds.
    pub conv: Vec<TensorId>,
    /// `[value_heads]`
    pub a_log: TensorId,
    /// `[value_heads]`
    pub dt_bias: TensorId,
    /// Over each head of the output, with gains `[value_dim]` that all heads share.
    pub norm: Norm,
    /// Whether beta is doubled (OLMo-Hybrid).
    pub negative_eigenvalues: bool,
    /// `[hidden, value_heads * value_dim]`
    pub o: Linear,
}

impl GatedDelta {
    /// Added to the square of a length of q and k.
    pub const L2_EPS: f32 = 1e-6;

    /// Its matrices that read the layer's input: q, k, v, z, b, a.
    pub fn projections(&self) -> [&Linear; 6] {
        [&self.q, &self.k, &self.v, &self.z, &self.b, &self.a]
    }

    /// Channels of the convolution.
    pub fn channels(&self) -> u32 {
        self.q.rows + self.k.rows + self.v.rows
    }

    /// Values of the state of a sequence: `S` of all heads, then inputs of the convolution.
    pub fn state_values(&self) -> u64 {
        let matrices = u64::from(self.value_heads) * u64::from(self.key_dim) * u64::from(self.value_dim);
        matrices + u64::from(self.channels()) * u64::from(self.kernel - 1)
    }
}

/// A gated short convolution (LFM2), as `Lfm2ShortConv` of transformers.
///
/// The state of a sequence is `u` of the last `kernel - 1` positions; zeros before the first one.
///
/// ```text
/// u       = b(x) * h(x)                                           channel by channel, as all but the linears
/// v       = sum over taps i of conv[:, i] * u at position - (kernel - 1 - i), + conv_bias?
/// output  = o(c(x) * v)
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ShortConv {
    /// Taps of the convolution, the current position's included.
    pub kernel: u32,
    /// `[hidden, hidden]`, as `c` and `h`.
    pub b: Linear,
    pub c: Linear,
    pub h: Linear,
    /// Taps `[hidden, kernel]`, oldest first.
    pub conv: TensorId,
    /// `[hidden]`
    pub conv_bias: Option<TensorId>,
    /// `[hidden, hidden]`
    pub o: Linear,
}

impl ShortConv {
    /// Its matrices that read the layer's input: b, c, h.
    pub fn projections(&self) -> [&Linear; 3] {
        [&self.b, &self.c, &self.h]
    }

    /// Values of the state of a sequence.
    pub fn state_values(&self) -> u64 {
        u64::from(self.h.rows) * u64::from(self.kernel - 1)
    }
}

/// A Mamba-2 layer (Granite-4-H, Nemotron-H, Falcon-H1), after Dao and Gu 2024 (arXiv 2405.21060), as `BambaMixer` of transformers.
///
/// The state of a sequence is a matrix `S` `[head_dim, state]` for each head, and the last `kernel - 1` inputs of the convolution; zeros
/// before the first position. Head `i` has the b and c of group `i / (heads / groups)`.
///
/// ```text
/// [z; h; b; c; dt] = each of its scale * its linear (input_scale * x)
/// u          = [h; b; c]                                           one channel after another
/// [h; b; c]  = silu(sum over taps i of conv[:, i] * u at position - (kernel - 1 - i), + conv_bias?)
/// dt         = softplus(dt + dt_bias)                              one for each head, as the decay
/// decay      = exp(-exp(a_log) * dt)
/// S          = decay * S + dt * h b^T                              head by head
/// y          = S c + d * h
/// output     = output_scale * o(gated(y, z))
/// gated      = y * silu(z), or norm(y * silu(z)), or norm(y) * silu(z)
/// ```
///
/// Steps `dt` have no limits: `time_step_limit` of checkpoints is `[0, infinity]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mamba2 {
    pub heads: u32,
    /// Width of a head of z, h and the output.
    pub head_dim: u32,
    /// Divides `heads`.
    pub groups: u32,
    /// Width of b and c of a group.
    pub state: u32,
    /// Taps of the convolution, the current position's included.
    pub kernel: u32,
    /// The gate of the output, `[heads * head_dim, hidden]`, as `h`.
    pub z: Linear,
    pub h: Linear,
    /// `[groups * state, hidden]`, as `c`.
    pub b: Linear,
    pub c: Linear,
    /// `[heads, hidden]`
    pub dt: Linear,
    /// Multiplies the input of these (Falcon-H1), else 1, as all scales.
    pub input_scale: f32,
    /// Multiply the outputs of z, h, b, c and dt, biases included.
    pub scales: [f32; 5],
    /// Taps `[channels, kernel]` of the channels of h, b and c in turn, oldest first.
    pub conv: TensorId,
    /// `[channels]`
    pub conv_bias: Option<TensorId>,
    /// `[heads]`, as `d` and `dt_bias`.
    pub a_log: TensorId,
    pub d: TensorId,
    pub dt_bias: TensorId,
    pub norm: Option<GatedNorm>,
    /// `[hidden, heads * head_dim]`
    pub o: Linear,
    pub output_scale: f32,
}

/// A norm beside a gate.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedNorm {
    /// Gains `[heads * head_dim]`.
    pub norm: Norm,
    /// Parts of the vector that are normed each alone, with gains of their own.
    pub groups: u32,
    /// Whether the gate multiplies what the norm leaves, in the place of what it reads (`mamba_norm_before_gate`).
    pub before_gate: bool,
}

impl Mamba2 {
    /// Its matrices that read the layer's input: z, h, b, c, dt.
    pub fn projections(&self) -> [&Linear; 5] {
        [&self.z, &self.h, &self.b, &self.c, &self.dt]
    }

    /// Its matrices: those of [`projections`](Self::projections), then o.
    pub fn linears(&self) -> Vec<&Linear> {
        self.projections().into_iter().chain([&self.o]).collect()
    }

    /// Channels of the convolution.
    pub fn channels(&self) -> u32 {
        self.h.rows + self.b.rows + self.c.rows
    }

    /// Values of the state of a sequence: `S` of all heads, then inputs of the convolution.
    pub fn state_values(&self) -> u64 {
        let matrices = u64::from(self.heads) * u64::from(self.head_dim) * u64::from(self.state);
        matrices + u64::from(self.channels()) * u64::from(self.kernel - 1)
    }
}

/// Attention and Mamba-2 that read the same input (Falcon-H1).
///
/// `output = attention_scales[1] * attention(attention_scales[0] * x) + mamba(x)`
#[derive(Debug, Clone, PartialEq)]
pub struct SideBySide {
    pub attention: Attention,
    /// Multiply the input and the output of attention. A factor of its keys alone is part of its `scale`.
    pub attention_scales: [f32; 2],
    pub mamba: Mamba2,
}

/// What follows the mixer in a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// Nothing: neither it nor the norms around it (Nemotron-H, where two mixers follow each other).
    None,
    Dense(Mlp),
    Scaled(Box<ScaledMlp>),
    Experts(Box<Experts>),
}

/// An MLP with factors (Falcon-H1): `down_scale * down(act(gate_scale * gate(x)) * up(x))`, biases included.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledMlp {
    /// Has a gate.
    pub mlp: Mlp,
    pub gate_scale: f32,
    pub down_scale: f32,
}

impl FeedForward {
    /// The MLP of a layer without experts, if it has no factors.
    pub fn dense(&self) -> Option<&Mlp> {
        match self {
            FeedForward::Dense(mlp) => Some(mlp),
            FeedForward::None | FeedForward::Scaled(_) | FeedForward::Experts(_) => None,
        }
    }

    pub fn dense_mut(&mut self) -> Option<&mut Mlp> {
        match self {
            FeedForward::Dense(mlp) => Some(mlp),
            FeedForward::None | FeedForward::Scaled(_) | FeedForward::Experts(_) => None,
        }
    }

    pub fn experts(&self) -> Option<&Experts> {
        match self {
            FeedForward::None | FeedForward::Dense(_) | FeedForward::Scaled(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    /// The MLP of a layer without experts, whether it has factors or not.
    pub fn plain(&self) -> Option<&Mlp> {
        match self {
            FeedForward::Scaled(scaled) => Some(&scaled.mlp),
            _ => self.dense(),
        }
    }

    /// Its MLPs: the only one, or those of the experts by id, then the shared one.
    pub fn mlps(&self) -> impl Iterator<Item = &Mlp> {
        let shared = self.experts().and_then(|experts| experts.shared.as_ref()).map(|shared| &shared.mlp);
        let own = self.experts().map_or(&[][..], |experts| &experts.experts);
        self.plain().into_iter().chain(own).chain(shared)
    }

    /// The matrices of its MLPs, before them the router and the gate of the shared expert.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.choosing().chain(self.mlps().flat_map(Mlp::linears))
    }

    /// The router and the gate of the shared expert: a precision leaves their values as they are.
    pub fn choosing(&self) -> impl Iterator<Item = &Linear> {
        let experts = self.experts();
        let gate = experts.and_then(|experts| experts.shared.as_ref()?.gate.as_ref());
        experts.map(|experts| &experts.router.linear).into_iter().chain(gate)
    }
}

/// A mixture of experts: each row is computed by the experts that the router chooses for it.
///
/// `y = sum over slots s of weight_s * mlp_(expert_s)(x)`, added in the order of slots, then the shared expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    pub router: Router,
    /// By expert id, all of one shape and activation.
    pub experts: Vec<Mlp>,
    pub shared: Option<SharedExpert>,
}

impl Experts {
    /// Experts that at least one of `rows` rows chooses, on average, if each row chooses any `top_k` of them alike and on its own:
    /// `n (1 - (1 - top_k / n)^rows)` of `n` experts. A skewed router chooses fewer.
    pub fn distinct(&self, rows: u32) -> f64 {
        let count = self.experts.len().max(1) as f64;
        let chosen = (f64::from(self.router.top_k) / count).min(1.0);
        count * (1.0 - (1.0 - chosen).powi(rows as i32))
    }
}

/// An expert that every row is computed by. Several shared experts of a checkpoint are one of their joint width.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpert {
    pub mlp: Mlp,
    /// `[1, hidden]`: the sigmoid of its output multiplies the shared expert's output (Qwen2-MoE).
    pub gate: Option<Linear>,
    /// Multiplies its output: 1/2 in a mean of experts and shared experts (Cohere2-MoE), else 1.
    pub scale: f32,
}

/// Chooses `top_k` experts and their weights for a row.
///
/// ```text
/// score  = softmax(linear(x)), or sigmoid(linear(x))
/// choice = score + correction?
/// groups: keep the experts of the best groups
/// slots  = the top_k experts of the largest choice, largest first; of equal ones the lower id first
/// weight = score of the slot's expert, / (sum of them + normalise)?, * scale
/// ```
///
/// `torch.topk` orders distinct values alike, and promises no order for equal ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Router {
    /// `[experts, hidden]`, may have a bias (gpt-oss).
    pub linear: Linear,
    /// Slots of a row: experts that it is computed by.
    pub top_k: u32,
    pub score: Score,
    /// `[experts]`, added to the scores for the choice alone.
    pub correction: Option<TensorId>,
    pub groups: Option<ExpertGroups>,
    /// The chosen weights are divided by their sum plus this; `None`: they are not. Softmax after the choice (Granite-MoE, gpt-oss) is
    /// a softmax over all that is normalised: both are `exp(l_e) / sum over the chosen of exp(l)`.
    pub normalise: Option<f32>,
    /// Multiplies the weights at last.
    pub scale: f32,
}

/// From the router's outputs to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Score {
    /// Over all experts.
    Softmax,
    Sigmoid,
}

/// Experts `i * n .. (i + 1) * n` are group `i`, of `n` experts each. Only experts of the `kept` groups with the largest group scores
/// can be chosen; of equal groups the lower one is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Divides the number of experts.
    pub count: u32,
    pub kept: u32,
    pub score: GroupScore,
}

/// The score of a group, from what its experts are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupScore {
    /// The largest one (DeepSeek-V2).
    Max,
    /// The sum of the two largest ones (DeepSeek-V3, GLM-4.5).
    SumOfTwo,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    pub heads: u32,
    /// Divides `heads`.
    pub kv_heads: u32,
    pub head_dim: u32,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`
    pub k: Linear,
    pub v: Linear,
    /// `[hidden, heads * head_dim]`
    pub o: Linear,
    pub q_norm: Option<QkNorm>,
    pub k_norm: Option<QkNorm>,
    /// `None`: no rotary embedding in this layer (SmolLM3).
    pub rope: Option<RopeId>,
    /// Multiplies `q . k`.
    pub scale: f32,
    /// `cap * tanh(score / cap)`, after the scale (Gemma 2).
    pub softcap: Option<f32>,
    /// Positions seen, the current one included: key `j` is visible to query `i` when `i - j < window`.
    pub window: Option<u32>,
    /// One value each: the scales of keys and values that the checkpoint has for a cache in fp8.
    pub cache_scales: Option<[TensorId; 2]>,
    /// `[heads]`: one more score in the softmax of each head, with no value. Neither scale nor softcap change it (gpt-oss).
    pub sinks: Option<TensorId>,
    /// `[heads * head_dim, hidden]`, of the input of q: `o` reads attention times `sigmoid(gate)` (Qwen3.5, AFMoE).
    pub gate: Option<Linear>,
    /// Multiplies q after RoPE and norm (Ministral 3).
    pub query_scale: Option<QueryScale>,
    /// `q_norm` and `k_norm` follow RoPE (Hunyuan).
    pub norm_after_rope: bool,
}

impl Attention {
    /// What reads the normed input as one product: q, k, v, then the gate.
    pub fn projections(&self) -> Vec<&Linear> {
        [&self.q, &self.k, &self.v].into_iter().chain(&self.gate).collect()
    }
}

/// `1 + beta * ln(1 + floor(position / original))`
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScale {
    pub beta: f32,
    /// Positions without an effect; above 0.
    pub original: u32,
}

/// Norm of q or k before RoPE, or after it, without a bias.
#[derive(Debug, Clone, PartialEq)]
pub struct QkNorm {
    pub kind: NormKind,
    pub eps: f32,
    /// The gains that `span` asks for, in the order of the heads: one tensor, or one a head (StableLM).
    pub weights: Vec<TensorId>,
    /// Added to the gains before use, as in [`Norm`].
    pub weight_offset: f32,
    pub span: QkNormSpan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QkNormSpan {
    /// Each head alone, with gains `[head_dim]` that all heads share (Qwen3, Gemma 3).
    Head,
    /// Each head alone, with gains of its own: `[heads * head_dim]` (Cohere, StableLM).
    OwnGains,
    /// The whole projection, gains `[heads * head_dim]` (OLMo 2).
    Projection,
}

impl QkNormSpan {
    pub const ALL: [QkNormSpan; 3] = [QkNormSpan::Head, QkNormSpan::OwnGains, QkNormSpan::Projection];

    /// The name in text forms.
    pub fn name(self) -> &'static str {
        match self {
            QkNormSpan::Head => "head",
            QkNormSpan::OwnGains => "own_gains",
            QkNormSpan::Projection => "projection",
        }
    }

    /// Gains for a projection of `heads` heads.
    pub fn gains(self, heads: u32, head_dim: u32) -> u32 {
        match self {
            QkNormSpan::Head => head_dim,
            QkNormSpan::OwnGains | QkNormSpan::Projection => heads * head_dim,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    pub act: Act,
    /// `Some`: `down(act(gate(x)) * up(x))`; `None`: `down(act(up(x)))`.
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
    /// Takes the place of `act(gate) * up`; only with a gate.
    pub swiglu: Option<ClampedSwiglu>,
}

impl Mlp {
    /// Its matrices: gate, up, down.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.gate.iter().chain([&self.up, &self.down])
    }
}

/// With `g = min(gate(x), limit)` and `u = clamp(up(x), -limit, limit)`: `down((u + 1) * g * sigmoid(alpha * g))` (gpt-oss).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedSwiglu {
    pub alpha: f32,
    pub limit: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    Silu,
    /// `0.5 x (1 + erf(x / sqrt 2))`
    GeluErf,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    GeluTanh,
    Relu,
    /// `max(x, 0)^2` (Nemotron-H)
    SquaredRelu,
}

/// Rotary embedding of the first `2 * inv_freq.len()` dimensions of a head; the rest pass through.
///
/// angle(position, i) = position * inv_freq[i], in fp32 as transformers computes it; cos and sin are multiplied by `scale`.
/// Which inv_freq a scaling kind (linear, llama3, yarn, ...) yields is the importer's business.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub inv_freq: Vec<f32>,
    /// yarn and longrope attention factor; 1.0 otherwise.
    pub scale: f32,
    /// `false`: pairs are (i, i + n/2), rotate-half. `true`: pairs are (2i, 2i + 1) (Cohere).
    pub interleaved: bool,
}

impl ModelGraph {
    /// Whether some layer keeps a recurrent state in place of a history.
    pub fn has_state(&self) -> bool {
        self.layers.iter().any(|layer| layer.attention().is_none())
    }

    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Scalars in all tensors; a tied head counts once, in codes of its own too.
    pub fn parameter_count(&self) -> u64 {
        let head = self.head.weight.tensor;
        let again = head != self.embed && self.tensor(head).name == self.tensor(self.embed).name;
        let twice = if again { self.tensor(head).count() } else { 0 };
        self.tensors.iter().map(Tensor::count).sum::<u64>() - twice
    }

    /// Bytes of all tensors as the checkpoint stores them; of scales, those that a pack has.
    pub fn stored_bytes(&self) -> u64 {
        (0..).map(TensorId).zip(&self.tensors).map(|(id, tensor)| self.bytes_of(id, tensor.dtype, tensor.count())).sum()
    }

    /// Weight bytes that a step of `rows` rows has to read: every tensor once, of an untied embedding a row for each, of experts those that
    /// are chosen, by [`Experts::distinct`].
    ///
    /// A lower bound: every value that is not stored as a code is counted as one of `dtype`, norm gains and biases included.
    pub fn step_bytes(&self, dtype: DType, rows: u32) -> u64 {
        let mut shares: BTreeMap<TensorId, f64> = BTreeMap::new();
        for experts in self.layers.iter().filter_map(|layer| layer.feed.experts()) {
            let share = experts.distinct(rows) / experts.experts.len().max(1) as f64;
            for linear in experts.experts.iter().flat_map(Mlp::linears) {
                shares.insert(linear.weight.tensor, share);
                shares.extend(linear.bias.iter().map(|bias| (bias.tensor, share)));
            }
        }
        let of = |(id, tensor): (TensorId, &Tensor)| {
            let bytes = self.bytes_of(id, dtype, tensor.count());
            shares.get(&id).map_or(bytes, |share| (bytes as f64 * share) as u64)
        };
        let all: u64 = (0..).map(TensorId).zip(&self.tensors).map(of).sum();
        let row = u64::from(self.hidden) * dtype.bytes() as u64;
        let tied = self.head.weight.tensor == self.embed;
        all - if tied { 0 } else { u64::from(self.vocab) * row } + u64::from(rows) * row
    }

    /// Whether a layer has experts.
    pub fn has_experts(&self) -> bool {
        self.layers.iter().any(|layer| layer.feed.experts().is_some())
    }

    /// Parameters that one row is computed with: those of [`step_bytes`](Self::step_bytes), for one row.
    pub fn active_parameters(&self) -> u64 {
        let plain = ModelGraph { formats: BTreeMap::new(), ..self.clone() };
        plain.step_bytes(DType::F32, 1) / DType::F32.bytes() as u64
    }

    /// Bytes of `count` weights of a tensor, if values are of `dtype`.
    pub fn bytes_of(&self, id: TensorId, dtype: DType, count: u64) -> u64 {
        match self.formats.get(&id) {
            Some(format) => (count as f64 * format.bytes_per_weight()) as u64,
            None => count * dtype.bytes() as u64,
        }
    }
}
