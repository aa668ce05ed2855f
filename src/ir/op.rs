//! Owns the closed vocabulary of tile-level ops and the operand table of each: roles, accesses and row kinds.

use crate::model::graph::{Act, ClampedSwiglu, ExpertGroups, NormKind, QkNormSpan, QueryScale, Score};

/// What a task does. Sizes are elements; every op is pure compute over its declared operands.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// token = prompt[p] while p is inside the prompt, else the arg-max over all arg-max pairs of the previous step.
    /// One task per SM, so that every SM knows the token and the stop condition without another hop.
    Select,
    /// Hands the token of this step to the host.
    Report,
    /// Chooses the experts of a row, for a table of choices, and says how much each counts.
    Route(Route),
    /// `residual[i] = x[i] = scale * table[token][i]`. One launch index is 8 columns. If `everywhere`, it is a whole row, each SM
    /// has one, and nothing is published.
    Embed { scale: f32, everywhere: bool },
    /// How a draft begins: `out[i] = scale * table[token][i]`, `given[i]` = what is given for the position, as the tokens of a prompt are, or else what the
    /// step before left in `x`, with the final norm; and `residual[i] = 0`. One launch index is 8 columns.
    Join { scale: f32 },
    /// `y = W norm(x)`, then the epilogue. One launch index is a unit of W: 8 rows, or 4 or 2.
    MatVec(MatVec),
    /// RoPE, cache append and attention over the history and the rows of the sequence in this step, up to the task's own.
    /// Launch index `i`: a group of query heads that share a KV head; `j`: a share of the history, one of the KV splits.
    Attention(Attention),
    /// Merges the partial attention of all shares of one query head.
    /// The record of head `h`, share `s` starts at column `((h / g) * splits + s) * g * r + (h % g) * r` with
    /// `g = heads_per_task` and `r = head_dim + PARTIAL_HEADER`, and holds the running maximum, the running sum, and
    /// `head_dim` sums not yet divided by it. With `gate`, as of the attention, the result is multiplied by `sigmoid(gate)`.
    AttentionMerge { head_dim: u32, splits: u32, heads_per_task: u32, gate: bool },
    /// `residual += scale * norm(y)`; publishes the sum. One launch index is 8 columns. If `everywhere`, it is all columns, each
    /// SM has one, and nothing is published: every SM reads all of `y` for the norm anyway, so it can add all of it up.
    NormAdd { norm: NormAttr, width: u32, scale: f32, everywhere: bool },
    /// Adds up what the experts of a row made of it. One launch index is 8 columns.
    Combine(Combine),
    /// Brings a recurrent state to the position, and reads it there. Launch index `i`: a value head; `j`: a part of the sequences.
    Mix(Mix),
    /// A gated convolution over the last positions. One launch index is 8 channels.
    Convolve(Convolve),
    /// Mamba-2: brings a recurrent state to the position, and reads it there. Launch index `i`: a head; `j`: a part of the sequences.
    Scan(Scan),
    /// A norm of groups of columns, and what multiplies it. One launch index is a group.
    GroupNorm(GroupNorm),
}

/// From scores to `top_k` experts and their weights, as [`crate::model::graph::Router`] says: `x` has the outputs of the router in
/// its first `experts` columns, `bias` the correction, if there is one. `out` has the experts, `shares` their weights, both by slot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    pub experts: u32,
    pub top_k: u32,
    pub score: Score,
    pub groups: Option<ExpertGroups>,
    /// Added to the sum that weights are divided by; `None`: they are not divided.
    pub normalise: Option<f32>,
    pub scale: f32,
}

/// `y = sum over slots s of shares[s] * x_s`, in the order of slots, then `shared * sigmoid?(gate) * x_slots`: that of a shared expert.
/// With a residual, `residual += scale * y` and `out`, if it is there, is the sum; else `out = y`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Combine {
    pub width: u32,
    /// Experts of a row, without the shared one.
    pub slots: u32,
    /// What multiplies a shared expert, if there is one. Its gate, if it has one, is an operand.
    pub shared: Option<f32>,
    pub scale: f32,
    /// Whether it updates a residual.
    pub adds: bool,
}

impl Combine {
    /// Its inputs: one for each slot, and that of the shared expert.
    pub fn inputs(&self) -> u32 {
        self.slots + u32::from(self.shared.is_some())
    }
}

/// One position of a gated delta net (arXiv 2412.06464). Value head `h` has q and k of key head `h / (value_heads / key_heads)`.
///
/// ```text
/// [q; k; v]  = silu(sum over taps t of conv[:, t] * input at position - (kernel - 1 - t))     channel by channel
/// q          = q / sqrt(|q|^2 + L2_EPS) / sqrt(key_dim),  k = k / sqrt(|k|^2 + L2_EPS)
/// beta       = sigmoid(beta) * (2 if doubles),  decay = exp(-exp(a_log) * softplus(decay + dt_bias))
/// S          = decay * S;  S = S + k (beta * (v - S^T k))^T
/// out        = rms_norm(S^T q) * silu(gate)
/// ```
///
/// The state of a head is `S`, row by row, then the inputs of the convolution at the last `kernel - 1` positions, oldest first: q, k and v
/// of each. At position 0 all of it counts as zeros, whatever memory holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    pub key_heads: u32,
    /// A multiple of `key_heads`.
    pub value_heads: u32,
    /// Width of a head of q and k.
    pub key_dim: u32,
    /// Width of a head of v, the gate and the output.
    pub value_dim: u32,
    /// Taps of the convolution, that of the position itself included.
    pub kernel: u32,
    /// Of the norm of each head of the output.
    pub eps: f32,
    pub doubles: bool,
}

impl Mix {
    /// Added to the square of a length of q and k.
    pub const L2_EPS: f32 = 1e-6;

    /// Value heads that share a key head.
    pub fn group(&self) -> u32 {
        self.value_heads / self.key_heads
    }

    /// Channels of the convolution that a value head has: those of its q, k and v.
    pub fn channels(&self) -> u32 {
        2 * self.key_dim + self.value_dim
    }

    /// Values of the state of a value head.
    pub fn state_cols(&self) -> u32 {
        self.key_dim * self.value_dim + (self.kernel - 1) * self.channels()
    }

    /// Parts of the rows of a state that `threads` threads share, if each has a column.
    pub fn parts(&self, threads: u32) -> u32 {
        (threads / self.value_dim.max(1)).clamp(1, self.key_dim.max(1))
    }

    /// Columns of q, k and v of all heads: the channels of the convolution.
    pub fn qkv_cols(&self) -> u32 {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// One position of a gated short convolution, channel by channel.
///
/// ```text
/// u    = b * x
/// out  = c * (sum over taps t of conv[:, t] * u at position - (kernel - 1 - t), + bias?)
/// ```
///
/// The state of a channel is `u` at the last `kernel - 1` positions, oldest first. At position 0 all of it counts as zeros, whatever memory
/// holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Convolve {
    pub channels: u32,
    /// Taps of the convolution, that of the position itself included.
    pub kernel: u32,
}

impl Convolve {
    /// Values of the state of a channel.
    pub fn past(&self) -> u32 {
        self.kernel - 1
    }
}

/// One position of Mamba-2 (arXiv 2405.21060). Head `h` has b and c of group `h / (heads / groups)`.
///
/// ```text
/// [x; b; c]  = silu(sum over taps t of conv[:, t] * input at position - (kernel - 1 - t), + bias?)     channel by channel
/// step       = softplus(scale * step + dt_bias),  decay = exp(-exp(a_log) * step)
/// S          = decay * S + b (step * x)^T
/// y          = S^T c + d * x
/// out        = y, or y * silu(scale * gate)
/// ```
///
/// Each input is multiplied by its scale first. The state of a head is `S` `[state, head_dim]`, row by row, then the inputs of the convolution at
/// the last `kernel - 1` positions, oldest first: x, b and c of each. At position 0 all of it counts as zeros, whatever memory holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scan {
    pub heads: u32,
    /// Width of a head of x, the gate and the output.
    pub head_dim: u32,
    /// Divides `heads`.
    pub groups: u32,
    /// Width of b and c of a group.
    pub state: u32,
    /// Taps of the convolution, that of the position itself included.
    pub kernel: u32,
    /// Multiply x, b, c and the step.
    pub scales: [f32; 4],
    /// Multiplies the gate, if the output is gated.
    pub gate: Option<f32>,
}

impl Scan {
    /// Heads with the same b and c.
    pub fn group(&self) -> u32 {
        self.heads / self.groups
    }

    /// Columns of x of all heads, as of the gate and the output.
    pub fn inner(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: those of x, b and c.
    pub fn channels(&self) -> u32 {
        self.inner() + 2 * self.groups * self.state
    }

    /// Channels of a head: those of its x, b and c.
    pub fn head_channels(&self) -> u32 {
        self.head_dim + 2 * self.state
    }

    /// Values of the state of a head.
    pub fn state_cols(&self) -> u32 {
        self.state * self.head_dim + (self.kernel - 1) * self.head_channels()
    }

    /// Parts of the rows of a state that `threads` threads share, if each has a column.
    pub fn parts(&self, threads: u32) -> u32 {
        (threads / self.head_dim.max(1)).clamp(1, self.state.max(1))
    }
}

/// `out = x * rsqrt(mean(x^2) + eps) * w`, the mean over the columns of a group, times `silu(scale * gate)` if it is gated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNorm {
    pub width: u32,
    /// Divides `width`.
    pub groups: u32,
    pub eps: f32,
    /// Multiplies the gate, if there is one.
    pub gate: Option<f32>,
}

impl GroupNorm {
    /// Columns of a group.
    pub fn group(&self) -> u32 {
        self.width / self.groups
    }
}

/// `W` is `[rows, k]`; rows and k are the model's, padding exists only in the pack.
#[derive(Debug, Clone, PartialEq)]
pub struct MatVec {
    pub rows: u32,
    /// Columns of a matrix.
    pub k: u32,
    /// Inputs of `k` columns, side by side. With more than one each is multiplied with the matrix that its slot chose, and `y` is the sum over
    /// slots, in their order.
    pub slots: u32,
    /// Applied to the input by every task: its statistics come from the packets the task reads anyway.
    pub norm: Option<NormAttr>,
    /// The input is not an exchange, but the residual, of which the SM has all columns (`everywhere`).
    pub own_input: bool,
    pub epilogue: Epilogue,
    /// Rows of a unit, [`UNIT_ROWS`] or a part of them: see [`MatVec::takes_unit_rows`].
    pub unit_rows: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormAttr {
    pub kind: NormKind,
    pub eps: f32,
}

impl NormAttr {
    /// Whether it only multiplies each value, by its weight and by one factor of the row, and subtracts nothing.
    pub fn is_factor(&self) -> bool {
        self.kind == NormKind::Rms
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Epilogue {
    /// `out = y`
    Store,
    /// `out = y`, in fp32 whatever travels elsewhere: scores, of which an order is made.
    Scores,
    /// `out = act(y)`
    Act(Act),
    /// Units hold 4 gate rows, then 4 up rows: `out = act(gate) * up`, 4 columns a unit.
    Gated(Act),
    /// The same with `act(scale * gate)`.
    GatedBy { act: Act, scale: f32 },
    /// The same with the formula of [`ClampedSwiglu`].
    Clamped(ClampedSwiglu),
    /// `residual += scale * y; out = residual`
    Residual { scale: f32 },
    /// `logits = softcap?(scale * y)`, and the task's arg-max pair.
    Logits { scale: f32, softcap: Option<f32> },
}

impl Epilogue {
    /// Whether units hold gate rows, then up rows.
    pub fn is_gated(&self) -> bool {
        matches!(self, Epilogue::Gated(_) | Epilogue::GatedBy { .. } | Epilogue::Clamped(_))
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Query heads of one task; divides `group`.
    pub heads_per_task: u32,
    /// Query heads per KV head.
    pub group: u32,
    pub heads: u32,
    pub head_dim: u32,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub window: Option<u32>,
    /// Rotated dimensions of a head; 0: no RoPE.
    pub rotary: u32,
    /// Pairs (2i, 2i + 1) instead of (i, i + rotary / 2).
    pub interleaved: bool,
    pub q_norm: Option<QkNormAttr>,
    pub k_norm: Option<QkNormAttr>,
    /// Shares of the history; with 1 the task writes attention itself, else partials for `AttentionMerge`.
    pub splits: u32,
    /// Each head has a sink: one more score of the softmax, with no value. The share that has the current position adds it.
    pub sinks: bool,
    /// The output is multiplied by `sigmoid(gate)`: by the task, or by the merge of several shares.
    pub gate: bool,
    /// Multiplies q after RoPE and norm, see [`QueryScale`].
    pub query_scale: Option<QueryScale>,
    /// The norms of q and k follow RoPE.
    pub norm_after_rope: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNormAttr {
    pub norm: NormAttr,
    pub span: QkNormSpan,
}

impl QkNormAttr {
    /// Whether one factor of a row multiplies all of its heads.
    pub fn is_over_all_heads(&self) -> bool {
        self.span == QkNormSpan::Projection
    }
}

/// An op as a key of a map: equal for ops that are the same attribute by attribute, floats bit by bit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OpKey(Vec<u32>);

impl NormAttr {
    fn key(&self) -> [u32; 2] {
        let NormAttr { kind, eps } = *self;
        [kind as u32, eps.to_bits()]
    }
}

impl Op {
    /// The attributes in order. Destructured, so that a new attribute does not compile until it is part of the key.
    pub fn key(&self) -> OpKey {
        let flag = |key: &mut Vec<u32>, set: bool| key.push(u32::from(set));
        let optional = |key: &mut Vec<u32>, value: Option<u32>| {
            key.extend([u32::from(value.is_some()), value.unwrap_or(0)]);
        };
        let mut key = vec![];
        match self {
            Op::Select => key.push(0),
            Op::Report => key.push(1),
            Op::Route(Route { experts, top_k, score, groups, normalise, scale }) => {
                key.extend([7, *experts, *top_k, *score as u32, scale.to_bits()]);
                optional(&mut key, normalise.map(f32::to_bits));
                flag(&mut key, groups.is_some());
                key.extend(groups.iter().flat_map(|groups| {
                    let ExpertGroups { count, kept, score } = *groups;
                    [count, kept, score as u32]
                }));
            }
            Op::Combine(Combine { width, slots, shared, scale, adds }) => {
                key.extend([8, *width, *slots, scale.to_bits(), u32::from(*adds)]);
                optional(&mut key, shared.map(f32::to_bits));
            }
            Op::Mix(Mix { key_heads, value_heads, key_dim, value_dim, kernel, eps, doubles }) => {
                key.extend([9, *key_heads, *value_heads, *key_dim, *value_dim, *kernel, eps.to_bits()]);
                flag(&mut key, *doubles);
            }
            Op::Convolve(Convolve { channels, kernel }) => key.extend([10, *channels, *kernel]),
            Op::Scan(Scan { heads, head_dim, groups, state, kernel, scales, gate }) => {
                key.extend([11, *heads, *head_dim, *groups, *state, *kernel]);
                key.extend(scales.map(f32::to_bits));
                optional(&mut key, gate.map(f32::to_bits));
            }
            Op::GroupNorm(GroupNorm { width, groups, eps, gate }) => {
                key.extend([12, *width, *groups, eps.to_bits()]);
                optional(&mut key, gate.map(f32::to_bits));
            }
            Op::Embed { scale, everywhere } => key.extend([2, scale.to_bits(), u32::from(*everywhere)]),
            Op::Join { scale } => key.extend([13, scale.to_bits()]),
            Op::MatVec(MatVec { rows, k, slots, norm, own_input, epilogue, unit_rows }) => {
                key.extend([3, *rows, *k, *slots, *unit_rows]);
                flag(&mut key, *own_input);
                flag(&mut key, norm.is_some());
                norm.iter().for_each(|norm| key.extend(norm.key()));
                match *epilogue {
                    Epilogue::Store => key.push(0),
                    Epilogue::Scores => key.push(5),
                    Epilogue::Act(act) => key.extend([1, act as u32]),
                    Epilogue::Gated(act) => key.extend([2, act as u32]),
                    Epilogue::GatedBy { act, scale } => key.extend([7, act as u32, scale.to_bits()]),
                    Epilogue::Clamped(ClampedSwiglu { alpha, limit }) => {
                        key.extend([6, alpha.to_bits(), limit.to_bits()]);
                    }
                    Epilogue::Residual { scale } => key.extend([3, scale.to_bits()]),
                    Epilogue::Logits { scale, softcap } => {
                        key.extend([4, scale.to_bits()]);
                        optional(&mut key, softcap.map(f32::to_bits));
                    }
                }
            }
            Op::Attention(Attention {
                heads_per_task,
                group,
                heads,
                head_dim,
                scale,
                softcap,
                window,
                rotary,
                interleaved,
                q_norm,
                k_norm,
                splits,
                sinks,
                gate,
                query_scale,
                norm_after_rope,
            }) => {
                key.extend([4, *heads_per_task, *group, *heads, *head_dim, scale.to_bits(), *rotary, *splits]);
                optional(&mut key, softcap.map(f32::to_bits));
                optional(&mut key, *window);
                flag(&mut key, *interleaved);
                for norm in [q_norm, k_norm] {
                    flag(&mut key, norm.is_some());
                    if let Some(QkNormAttr { norm, span }) = norm {
                        key.extend(norm.key());
                        key.push(*span as u32);
                    }
                }
                [sinks, gate, norm_after_rope].into_iter().for_each(|set| flag(&mut key, *set));
                optional(&mut key, query_scale.map(|scale| scale.beta.to_bits()));
                optional(&mut key, query_scale.map(|scale| scale.original));
            }
            Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => {
                key.extend([5, *head_dim, *splits, *heads_per_task, u32::from(*gate)]);
            }
            Op::NormAdd { norm, width, scale, everywhere } => {
                key.push(6);
                key.extend(norm.key());
                key.extend([*width, scale.to_bits(), u32::from(*everywhere)]);
            }
        }
        OpKey(key)
    }
}

impl Attention {
    pub fn kv_heads(&self) -> u32 {
        self.heads / self.group
    }

    /// Launch extent along `i`.
    pub fn head_groups(&self) -> u32 {
        self.heads / self.heads_per_task
    }

    /// The history that share `j` reads at `position` is rows `start..end` (`start >= end`: none), all below `past`: the
    /// position of the first row that the sequence has in the step. Shares are multiples of [`HISTORY_ALIGN`] rows so that a
    /// share starts on a tile; with a window only the visible rows are shared out.
    pub fn history_share(&self, position: u32, past: u32, j: u32) -> (u32, u32) {
        let first = match self.window {
            Some(window) => (position + 1).saturating_sub(window),
            None => 0,
        };
        let share = past.saturating_sub(first).div_ceil(self.splits).next_multiple_of(HISTORY_ALIGN);
        let start = first + j * share;
        (start.min(past), (start + share).min(past))
    }
}

/// Shares of the history are multiples of this many rows: the k extent of one bf16 tensor-core product with probabilities.
pub const HISTORY_ALIGN: u32 = 16;
/// Output rows of one unit of a `MatVec`: the n extent of `mma.m16n8k16`. Units of 4 or 2 rows fill it with 2 or 4 parts of k.
pub const UNIT_ROWS: u32 = 8;
/// Most slots of a product over all slots: a loader keeps the choices of a run (`runtime/ring.cuh`).
pub const SLOTS_MAX: u32 = 16;
/// Floats of one partial attention record beside the head: running maximum and sum.
pub const PARTIAL_HEADER: u32 = 2;

/// What an operand is to its op; the order of the roles in [`Op::signature`] is the order of the operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Token,
    /// The best logit of each task of the head and its id: an arg-max pair.
    Best,
    Table,
    X,
    NormWeight,
    NormBias,
    Weight,
    Bias,
    Residual,
    Q,
    K,
    V,
    /// What is multiplied with its sigmoid: one value for each of the heads' columns, or one for a shared expert.
    Gate,
    QNormWeight,
    KNormWeight,
    Rope,
    CacheScales,
    Sinks,
    HistoryK,
    HistoryV,
    AppendK,
    AppendV,
    Partial,
    /// The entries of a table of choices that a task looks up.
    Choices,
    /// How much each slot counts.
    Shares,
    /// How strongly a state takes the position's value, before the sigmoid.
    Beta,
    /// How much of a state stays, before its bias and the softplus.
    Decay,
    /// What a state is written with, and what it is read with.
    B,
    C,
    /// How far a state moves on, before its bias and the softplus.
    Step,
    /// Taps of a convolution, channel by channel, oldest first.
    Conv,
    ALog,
    /// How much of its input a head adds to what its state gives.
    D,
    DtBias,
    State,
    /// What a draft reads beside its token.
    Given,
    Logits,
    Out,
}

impl Role {
    pub const ALL: [Role; 38] = [
        Role::Token,
        Role::Best,
        Role::Table,
        Role::X,
        Role::NormWeight,
        Role::NormBias,
        Role::Weight,
        Role::Bias,
        Role::Residual,
        Role::Q,
        Role::K,
        Role::V,
        Role::Gate,
        Role::QNormWeight,
        Role::KNormWeight,
        Role::Rope,
        Role::CacheScales,
        Role::Sinks,
        Role::HistoryK,
        Role::HistoryV,
        Role::AppendK,
        Role::AppendV,
        Role::Partial,
        Role::Choices,
        Role::Shares,
        Role::Beta,
        Role::Decay,
        Role::B,
        Role::C,
        Role::Step,
        Role::Conv,
        Role::ALog,
        Role::D,
        Role::DtBias,
        Role::State,
        Role::Given,
        Role::Logits,
        Role::Out,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Role::Token => "token",
            // The word that version 2 of the text form has.
            Role::Best => "candidates",
            Role::Table => "table",
            Role::X => "x",
            Role::NormWeight => "norm_weight",
            Role::NormBias => "norm_bias",
            Role::Weight => "weight",
            Role::Bias => "bias",
            Role::Residual => "residual",
            Role::Q => "q",
            Role::K => "k",
            Role::V => "v",
            Role::Gate => "gate",
            Role::QNormWeight => "q_norm_weight",
            Role::KNormWeight => "k_norm_weight",
            Role::Rope => "rope",
            Role::CacheScales => "cache_scales",
            Role::Sinks => "sinks",
            Role::HistoryK => "history_k",
            Role::HistoryV => "history_v",
            Role::AppendK => "append_k",
            Role::AppendV => "append_v",
            Role::Partial => "partial",
            Role::Choices => "choices",
            Role::Shares => "shares",
            Role::Beta => "beta",
            Role::Decay => "decay",
            Role::B => "b",
            Role::C => "c",
            Role::Step => "step",
            Role::Conv => "conv",
            Role::ALog => "a_log",
            Role::D => "d",
            Role::DtBias => "dt_bias",
            Role::State => "state",
            Role::Given => "given",
            Role::Logits => "logits",
            Role::Out => "out",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Role::ALL.into_iter().find(|r| r.name() == name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    Read,
    Write,
    /// Read, then written in place by the same task.
    Update,
    /// Brought in by the loader, ahead of the task's waits.
    Stream,
}

impl Access {
    pub fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Update => "update",
            Access::Stream => "stream",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        [Access::Read, Access::Write, Access::Update, Access::Stream].into_iter().find(|a| a.name() == name)
    }

    pub fn reads(self) -> bool {
        !matches!(self, Access::Write)
    }

    pub fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Update)
    }
}

/// One line of an op's operand table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub role: Role,
    pub access: Access,
    pub optional: bool,
}

impl Op {
    pub fn name(&self) -> &'static str {
        match self {
            Op::Select => "select",
            Op::Report => "report",
            Op::Route(_) => "route",
            Op::Combine(_) => "combine",
            Op::Mix(_) => "mix",
            Op::Convolve(_) => "convolve",
            Op::Scan(_) => "scan",
            Op::GroupNorm(_) => "group_norm",
            Op::Embed { .. } => "embed",
            Op::Join { .. } => "join",
            Op::MatVec(_) => "matvec",
            Op::Attention(_) => "attention",
            Op::AttentionMerge { .. } => "attention_merge",
            Op::NormAdd { .. } => "norm_add",
        }
    }

    /// The operand table: which roles the op takes, in which order, and how it touches each.
    pub fn signature(&self) -> &'static [Slot] {
        const fn need(role: Role, access: Access) -> Slot {
            Slot { role, access, optional: false }
        }
        const fn may(role: Role, access: Access) -> Slot {
            Slot { role, access, optional: true }
        }
        use Access::{Read, Stream, Update, Write};
        match self {
            Op::Select => const { &[need(Role::Best, Read), need(Role::Token, Write)] },
            Op::Report => const { &[need(Role::Token, Read), need(Role::Out, Write)] },
            Op::Route(_) => {
                const { &[need(Role::X, Read), may(Role::Bias, Read), need(Role::Shares, Write), need(Role::Out, Write)] }
            }
            Op::Mix(_) => {
                const {
                    &[
                        need(Role::Q, Read),
                        need(Role::K, Read),
                        need(Role::V, Read),
                        need(Role::Gate, Read),
                        need(Role::NormWeight, Read),
                        need(Role::Beta, Read),
                        need(Role::Decay, Read),
                        need(Role::Conv, Read),
                        need(Role::ALog, Read),
                        need(Role::DtBias, Read),
                        need(Role::State, Update),
                        need(Role::Out, Write),
                    ]
                }
            }
            Op::Convolve(_) => {
                const {
                    &[
                        need(Role::X, Read),
                        need(Role::B, Read),
                        need(Role::C, Read),
                        need(Role::Conv, Read),
                        may(Role::Bias, Read),
                        need(Role::State, Update),
                        need(Role::Out, Write),
                    ]
                }
            }
            Op::Scan(_) => {
                const {
                    &[
                        need(Role::X, Read),
                        need(Role::B, Read),
                        need(Role::C, Read),
                        need(Role::Step, Read),
                        may(Role::Gate, Read),
                        need(Role::Conv, Read),
                        may(Role::Bias, Read),
                        need(Role::ALog, Read),
                        need(Role::D, Read),
                        need(Role::DtBias, Read),
                        need(Role::State, Update),
                        need(Role::Out, Write),
                    ]
                }
            }
            Op::GroupNorm(_) => {
                const { &[need(Role::X, Read), may(Role::Gate, Read), need(Role::NormWeight, Read), need(Role::Out, Write)] }
            }
            Op::Combine(combine) => {
                // One `x` for each input, in order.
                const STORED: &[Slot] =
                    &[need(Role::X, Read), need(Role::Shares, Read), may(Role::Gate, Read), need(Role::Out, Write)];
                const ADDED: &[Slot] = &[
                    need(Role::X, Read),
                    need(Role::Shares, Read),
                    may(Role::Gate, Read),
                    need(Role::Residual, Update),
                    may(Role::Out, Write),
                ];
                if combine.adds { ADDED } else { STORED }
            }
            Op::Embed { everywhere, .. } => {
                const WHOLE: &[Slot] = &[need(Role::Token, Read), need(Role::Table, Read), need(Role::Residual, Write)];
                const OWNED: &[Slot] = &[
                    need(Role::Token, Read),
                    need(Role::Table, Read),
                    need(Role::Residual, Write),
                    need(Role::Out, Write),
                ];
                if *everywhere { WHOLE } else { OWNED }
            }
            Op::Join { .. } => {
                const {
                    &[
                        need(Role::X, Read),
                        need(Role::Token, Read),
                        need(Role::Table, Read),
                        need(Role::Residual, Write),
                        need(Role::Given, Write),
                        need(Role::Out, Write),
                    ]
                }
            }
            Op::MatVec(m) => match m.epilogue {
                Epilogue::Residual { .. } => {
                    const {
                        &[
                            need(Role::X, Read),
                            may(Role::NormWeight, Read),
                            may(Role::NormBias, Read),
                            need(Role::Weight, Stream),
                            may(Role::Bias, Read),
                            may(Role::Choices, Read),
                            need(Role::Residual, Update),
                            // A parallel block does not publish this sum: only the MLP's sum, added to it, is read.
                            may(Role::Out, Write),
                        ]
                    }
                }
                Epilogue::Logits { .. } => {
                    const {
                        &[
                            need(Role::X, Read),
                            may(Role::NormWeight, Read),
                            may(Role::NormBias, Read),
                            need(Role::Weight, Stream),
                            may(Role::Bias, Read),
                            need(Role::Logits, Write),
                            need(Role::Best, Write),
                        ]
                    }
                }
                Epilogue::Store
                | Epilogue::Scores
                | Epilogue::Act(_)
                | Epilogue::Gated(_)
                | Epilogue::GatedBy { .. }
                | Epilogue::Clamped(_) => {
                    const {
                        &[
                            need(Role::X, Read),
                            may(Role::NormWeight, Read),
                            may(Role::NormBias, Read),
                            need(Role::Weight, Stream),
                            may(Role::Bias, Read),
                            may(Role::Choices, Read),
                            // The result is multiplied with the share of its slot.
                            may(Role::Shares, Read),
                            need(Role::Out, Write),
                        ]
                    }
                }
            },
            Op::Attention(_) => {
                const {
                    &[
                        need(Role::Q, Read),
                        need(Role::K, Read),
                        need(Role::V, Read),
                        may(Role::Gate, Read),
                        may(Role::QNormWeight, Read),
                        may(Role::KNormWeight, Read),
                        may(Role::Rope, Read),
                        may(Role::CacheScales, Read),
                        may(Role::Sinks, Read),
                        need(Role::HistoryK, Stream),
                        need(Role::HistoryV, Stream),
                        need(Role::AppendK, Write),
                        need(Role::AppendV, Write),
                        need(Role::Out, Write),
                    ]
                }
            }
            Op::AttentionMerge { .. } => {
                const { &[need(Role::Partial, Read), may(Role::Gate, Read), need(Role::Out, Write)] }
            }
            Op::NormAdd { everywhere, .. } => {
                const WHOLE: &[Slot] = &[
                    need(Role::X, Read),
                    may(Role::NormWeight, Read),
                    may(Role::NormBias, Read),
                    need(Role::Residual, Update),
                ];
                const OWNED: &[Slot] = &[
                    need(Role::X, Read),
                    may(Role::NormWeight, Read),
                    may(Role::NormBias, Read),
                    need(Role::Residual, Update),
                    need(Role::Out, Write),
                ];
                if *everywhere { WHOLE } else { OWNED }
            }
        }
    }

    /// Whether every SM has a task of its own that does the whole op for that SM.
    pub fn everywhere(&self) -> bool {
        matches!(self, Op::Select | Op::Embed { everywhere: true, .. } | Op::NormAdd { everywhere: true, .. })
    }

    /// How many operands of `role` it takes, one after another, where it takes any.
    pub fn operands_of(&self, role: Role) -> usize {
        match self {
            Op::Combine(combine) if role == Role::X => combine.inputs() as usize,
            _ => 1,
        }
    }

    /// Ring slots a task must hold at once to make progress.
    pub fn ring_demand(&self) -> u32 {
        match self {
            Op::MatVec(_) => 1,
            // A key chunk and the value chunk of the same rows.
            Op::Attention(_) => 2,
            _ => 0,
        }
    }
}
