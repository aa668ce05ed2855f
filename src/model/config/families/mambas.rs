//! Owns families with Mamba-2: Granite 4, Nemotron-H and Falcon-H1.
//!
//! As in `families`, defaults and effects are those of the classes of transformers 5, with one exception: that version raises small steps
//! of Nemotron-H to `time_step_min` in a prompt and not in the tokens after it. No other implementation does, nor does this one.

use serde_json::{Value, json};

use super::hybrids::KERNEL_MAX;
use super::mixtures::{
    BY_SUM, EXPERT_WIDTH, EXPERTS_MAX, GRANITE_EXPERTS, GroupedRouter, Mixture, NORM_TOPK, ONE, ROUTING, STACKED,
};
use super::{
    ATTENTION_BIAS, Family, GRANITE_KEYS, HeadDim, KvHeads, LLAMA_NAMES, MLP_BIAS, SILU, Scalars, ShapeDefaults,
    granite_factors, plan, rope_rules, scalars, shape, shape_by, shape_with, uniform,
};
use crate::model::config::plan::{
    Ahead, Block, Each, ExpertNames, ExpertsPlan, GateUp, MambaPlan, Names, Plan, Prefix, Projections, SharedNames,
    SharedPlan, Stacked,
};
use crate::model::config::reader::{Answer, EXTENT_MAX, LAYERS_MAX, Reader};
use crate::model::config::reason::Reason;
use crate::model::config::rope::{self, ResolvedRope};
use crate::model::config::schema::{
    Entry, GATED_MLP, GROUPED, HEAD_DIM, Literal, OFF, RMS, ROPE, TRAINED, When, modelled, neutral,
};
use crate::model::graph::{Act, Rope, RopeId};

pub const GRANITE_HYBRID: Family = Family {
    class: "GraniteMoeHybridForCausalLM",
    model_type: "granitemoehybrid",
    keys: &[GRANITE_HYBRID_KEYS, MAMBA_KEYS, GRANITE_KEYS, ROUTING, ATTENTION_BIAS, GROUPED, RMS, ROPE, TRAINED],
    plan: granite_hybrid,
};
pub const NEMOTRON_H: Family = Family {
    class: "NemotronHForCausalLM",
    model_type: "nemotron_h",
    keys: &[NEMOTRON_KEYS, EXPERT_WIDTH, ROUTING, NORM_TOPK, GROUPED, HEAD_DIM],
    plan: nemotron_h,
};
pub const FALCON_H1: Family = Family {
    class: "FalconH1ForCausalLM",
    model_type: "falcon_h1",
    keys: &[FALCON_KEYS, MAMBA_KEYS, ATTENTION_BIAS, MLP_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
    plan: falcon_h1,
};

const CHUNKS: &str = "how Python splits a prompt; same formula";
const INIT: &str = "values before training";
const MAMBA_KEYS: &[Entry] = &[
    modelled("mamba_n_heads", "heads of Mamba-2; 128 where absent"),
    modelled("mamba_d_head", "width of a head of Mamba-2; `auto`, as where absent, is what its width leaves for each"),
    modelled("mamba_n_groups", "groups of heads with the same b and c; 1 where absent"),
    modelled("mamba_d_state", "states of a channel; 256 where absent"),
    modelled("mamba_d_conv", "taps of the convolution; 4 where absent"),
    modelled("mamba_expand", "width of Mamba-2, in widths of the residual stream; 2 where absent"),
    modelled("mamba_conv_bias", "bias of the convolution; true where absent"),
    modelled("mamba_proj_bias", "bias of the projection into Mamba-2, of Granite also out of it"),
    modelled("time_step_limit", "limits of the steps of Mamba-2: 0 and infinity"),
    neutral("mamba_chunk_size", When::Any, CHUNKS),
];
const GRANITE_HYBRID_KEYS: &[Entry] = &[
    modelled(
        "layer_types",
        "which layers have Mamba-2 (`mamba`, `linear_attention`), and which attention; all Mamba-2 where absent",
    ),
    neutral("layers_block_type", When::SameAs("layer_types"), "`layer_types` counts"),
    modelled("num_local_experts", "number of experts, 0 for an MLP; 8 where absent"),
    modelled("intermediate_size", "width of an expert"),
    modelled("shared_intermediate_size", "width of the shared expert, or of the MLP; 1024 where absent"),
    modelled("hidden_act", "activation: silu"),
    modelled("position_embedding_type", "`rope`, or `nope` or null for no rotary embedding"),
    neutral("normalization_function", When::Only(&[Literal::Text("rmsnorm")]), "every norm is an RMS norm"),
    neutral("init_method", When::Any, INIT),
];
const FALCON_KEYS: &[Entry] = &[
    modelled("mamba_d_ssm", "width of Mamba-2; 1024 where absent, by `mamba_expand` where null"),
    modelled("mamba_rms_norm", "whether Mamba-2 has a norm with its gate"),
    modelled("mamba_norm_before_gate", "whether this norm is before the gate; true where absent"),
    modelled("projectors_bias", "bias of the projection out of Mamba-2"),
    modelled("embedding_multiplier", "scale of the embedding"),
    modelled("lm_head_multiplier", "scale of the logits"),
    modelled("key_multiplier", "scale of the keys"),
    modelled("attention_in_multiplier", "scale of the input of attention"),
    modelled("attention_out_multiplier", "scale of the output of attention"),
    modelled("ssm_in_multiplier", "scale of the input of Mamba-2"),
    modelled("ssm_out_multiplier", "scale of the output of Mamba-2"),
    modelled("ssm_multipliers", "scales of z, x, b, c and dt of Mamba-2"),
    modelled("mlp_multipliers", "scales of the gate and of the output of the MLP"),
    neutral("mamba_use_mlp", When::Only(&[Literal::Bool(true)]), "the model code has an MLP in every layer"),
    neutral("attn_layer_indices", When::Only(&[]), "every layer has attention"),
    neutral("mlp_expansion_factor", When::Any, "`intermediate_size` counts"),
    neutral("num_logits_to_keep", When::Any, "selects what Python code returns"),
];
const NEMOTRON_KEYS: &[Entry] = &[
    modelled(
        "layers_block_type",
        "what each block is: Mamba-2 (`linear_attention`, `mamba`), attention (`full_attention`, `attention`), `mlp` or `moe`",
    ),
    modelled("layer_types", "the same as `layers_block_type`"),
    modelled("hybrid_override_pattern", "the same in letters: M, *, - and E"),
    modelled("num_hidden_layers", "number of blocks; must agree with their list"),
    modelled("intermediate_size", "width of the MLP; 21504 where absent"),
    modelled("layer_norm_epsilon", "epsilon of every RMS norm"),
    modelled("mamba_num_heads", "heads of Mamba-2; 128 where absent"),
    modelled("mamba_head_dim", "width of a head of Mamba-2; 64 where absent"),
    modelled("n_groups", "groups of heads with the same b and c; 8 where absent"),
    modelled("ssm_state_size", "states of a channel; 128 where absent"),
    modelled("conv_kernel", "taps of the convolution; 4 where absent"),
    modelled("use_conv_bias", "bias of the convolution; true where absent"),
    modelled("use_bias", "biases of the projections of Mamba-2"),
    modelled("time_step_limit", "limits of the steps of Mamba-2: 0 and infinity"),
    modelled("time_step_min", "no limit, but a note: transformers 5 applies it to prompts alone; 0.001 where absent"),
    modelled("n_routed_experts", "number of experts; 8 where absent"),
    modelled("num_local_experts", "number of experts; the same as `n_routed_experts`"),
    modelled("n_group", "groups of experts; 1 where absent"),
    modelled("topk_group", "groups that experts are chosen from; 1 where absent"),
    modelled("routed_scaling_factor", "multiplies the weights of the chosen experts; 1 where absent"),
    modelled("moe_shared_expert_intermediate_size", "width of the shared expert; 7688 where absent"),
    modelled("attention_head_dim", "width of a head; must agree with `head_dim`"),
    neutral("n_shared_experts", ONE, "the model code has one of its own width"),
    neutral("moe_latent_size", When::Only(&[]), "experts in a latent space are not supported"),
    neutral("moe_shared_expert_overlap", When::Any, "the order in which Python computes"),
    neutral("tie_word_embeddings", OFF, "the model code has a head of its own"),
    neutral("mlp_hidden_act", When::Only(&[Literal::Text("relu2")]), "MLPs and experts have a squared ReLU"),
    neutral("mamba_hidden_act", When::Only(&[Literal::Text("silu")]), "Mamba-2 has this activation"),
    neutral("mlp_bias", OFF, "biases of MLPs are not supported"),
    neutral("attention_bias", OFF, "the model code has no biases"),
    neutral("mamba_proj_bias", OFF, "the model code reads `use_bias`"),
    neutral("sliding_window", When::Only(&[]), "the model code has no windows"),
    neutral("rms_norm_eps", When::SameAs("layer_norm_epsilon"), "the model code reads `layer_norm_epsilon`"),
    neutral("norm_eps", When::SameAs("layer_norm_epsilon"), "the model code reads `layer_norm_epsilon`"),
    neutral("num_query_groups", When::SameAs("num_key_value_heads"), "the model code reads `num_key_value_heads`"),
    neutral("expand", When::Any, "heads and their width count"),
    neutral("chunk_size", When::Any, CHUNKS),
    neutral("use_mamba_kernels", When::Any, "which Python kernel; same formula"),
    neutral("mamba_ssm_cache_dtype", When::Only(&[Literal::Text("float32")]), "states are kept in fp32"),
    neutral("residual_in_fp32", When::Any, "where Python code rounds"),
    neutral("rescale_prenorm_residual", When::Any, INIT),
    neutral("time_step_max", When::Any, INIT),
    neutral("time_step_floor", When::Any, INIT),
    neutral("time_step_rank", When::Any, INIT),
    neutral("rope_theta", When::Any, "attention has no rotary embedding"),
    neutral("partial_rotary_factor", When::Any, "attention has no rotary embedding"),
    neutral("num_logits_to_keep", When::Any, "selects what Python code returns"),
    neutral("num_nextn_predict_layers", When::Any, "layers that predict further tokens are left out"),
    neutral("mtp_layers_block_type", When::Any, "layers that predict further tokens are left out"),
    neutral("mtp_hybrid_override_pattern", When::Any, "layers that predict further tokens are left out"),
];

/// Extents of Mamba-2, and the keys that they have in a family.
struct Extents {
    heads: (&'static str, u32),
    head_dim: (&'static str, u32),
    groups: (&'static str, u32),
    state: (&'static str, u32),
    kernel: (&'static str, u32),
}

impl Extents {
    /// Mamba-2 in `layers`, without a norm, biases and scales.
    fn plan(self, r: &mut Reader, layers: Vec<bool>, module: &'static str) -> Option<MambaPlan> {
        let Extents { heads, head_dim, groups, state, kernel } = self;
        let before = r.reasons.len();
        let mut bad = |key: &str, expected: String, found: u32| {
            r.reasons.push(Reason::BadValue { key: key.to_string(), expected, found: found.to_string() });
        };
        if kernel.1 < 2 {
            bad(kernel.0, "at least 2".to_string(), kernel.1);
        }
        if !heads.1.is_multiple_of(groups.1) {
            bad(groups.0, format!("a divisor of {} heads", heads.1), groups.1);
        }
        // The fused projection stacks two of each; its rows have to stay in 32 bits.
        for ((_, count), (key, width)) in [(heads, head_dim), (groups, state)] {
            if u64::from(count) * u64::from(width) > u64::from(EXTENT_MAX) || width == 0 {
                bad(key, format!("1 to {EXTENT_MAX} over all {count}"), width);
            }
        }
        (r.reasons.len() == before).then_some(MambaPlan {
            layers,
            beside: None,
            heads: heads.1,
            head_dim: head_dim.1,
            groups: groups.1,
            state: state.1,
            kernel: kernel.1,
            conv_bias: false,
            in_bias: false,
            out_bias: false,
            norm: None,
            input_scale: 1.0,
            scales: [1.0; 5],
            output_scale: 1.0,
            module,
        })
    }
}

/// Mamba-2 of width `inner` by the keys that Granite and Falcon share.
fn mamba(r: &mut Reader, layers: Vec<bool>, inner: u32, act: Act) -> Option<MambaPlan> {
    silu(r, act);
    unlimited(r);
    let heads = r.count("mamba_n_heads", 128, EXTENT_MAX);
    let head_dim = match r.value("mamba_d_head") {
        None => inner / heads,
        Some(value) if value == "auto" => inner / heads,
        Some(_) => r.count("mamba_d_head", 1, EXTENT_MAX),
    };
    if u64::from(heads) * u64::from(head_dim) != u64::from(inner) {
        let (key, expected) = ("mamba_n_heads".to_string(), format!("heads that make a width of {inner} together"));
        return r.refuse(Reason::BadValue { key, expected, found: format!("{heads} of {head_dim}") });
    }
    let extents = Extents {
        heads: ("mamba_n_heads", heads),
        head_dim: ("mamba_d_head", head_dim),
        groups: ("mamba_n_groups", r.count("mamba_n_groups", 1, EXTENT_MAX)),
        state: ("mamba_d_state", r.count("mamba_d_state", 256, EXTENT_MAX)),
        kernel: ("mamba_d_conv", r.count("mamba_d_conv", 4, KERNEL_MAX)),
    };
    let (conv_bias, in_bias) = (r.flag("mamba_conv_bias", true), r.flag("mamba_proj_bias", false));
    Some(MambaPlan { conv_bias, in_bias, ..extents.plan(r, layers, "mamba")? })
}

/// The width of Mamba-2 by `mamba_expand`.
fn expanded(r: &mut Reader, hidden: u32) -> u32 {
    r.count("mamba_expand", 2, 64).saturating_mul(hidden)
}

/// Refuses another activation than that of the convolution.
fn silu(r: &mut Reader, act: Act) {
    if act != Act::Silu {
        let (key, found) = ("hidden_act".to_string(), r.text("hidden_act", "silu"));
        let expected = "silu, as the convolution of Mamba-2 has the same activation".to_string();
        r.reasons.push(Reason::BadValue { key, expected, found });
    }
}

/// Refuses limits of the steps of Mamba-2, which transformers applies to a prompt and not to the tokens after it.
fn unlimited(r: &mut Reader) {
    let limits = r.given("time_step_limit");
    let without = |limits: &Value| {
        let [low, high] = limits.as_array().map_or(&[][..], Vec::as_slice) else { return false };
        low.as_f64() == Some(0.0) && *high == json!({"__float__": "Infinity"})
    };
    if let Some(found) = limits.filter(|limits| !without(limits)) {
        let expected = "[0.0, Infinity]: limits of steps are not supported".to_string();
        r.reasons.push(Reason::BadValue { key: "time_step_limit".to_string(), expected, found: found.to_string() });
    }
}

/// Granite 4 without experts.
static GRANITE_NAMES: Names =
    Names { gate: None, up: "shared_mlp.input_linear", down: "shared_mlp.output_linear", ..LLAMA_NAMES };

static GRANITE_HYBRID_EXPERTS: ExpertNames = ExpertNames {
    shared: &[SharedNames { gate: None, up: "shared_mlp.input_linear", down: "shared_mlp.output_linear" }],
    ..GRANITE_EXPERTS
};

const GRANITE_MIXERS: [&str; 4] = ["mamba", "linear_attention", "attention", "full_attention"];

fn granite_hybrid(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let bias = r.flag("attention_bias", false);
    let factors = granite_factors(r);
    let defaults = ShapeDefaults {
        class: "GraniteMoeHybridForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::NoKey,
    };
    let s = shape_with(r, defaults, |r| r.count("shared_intermediate_size", 1024, EXTENT_MAX))?;
    let words = r.layer_words("layer_types", s.layers, &GRANITE_MIXERS);
    let with_mamba = words.map_or(vec![true; s.layers as usize], |words| words.iter().map(|word| *word < 2).collect());
    let inner = expanded(r, s.hidden);
    let mamba = mamba(r, with_mamba, inner, scalars.act)?;
    let experts = match r.index("num_local_experts", 8) {
        0 => {
            // Of no effect without experts, and some checkpoints have 0 of them.
            for key in ["intermediate_size", "num_experts_per_tok"] {
                r.value(key);
            }
            None
        }
        _ => {
            let count = r.count("num_local_experts", 8, EXPERTS_MAX);
            let top_k = r.count("num_experts_per_tok", 2, EXPERTS_MAX);
            let width = r.count_required("intermediate_size", EXTENT_MAX);
            let mixture = Mixture { layers: vec![true; s.layers as usize], count, top_k, width, shared: 0 };
            let shared = Some(SharedPlan { width: s.intermediate, gated: false, scale: 1.0 });
            // A softmax over the chosen experts.
            Some(ExpertsPlan { normalise: BY_SUM, shared, ..mixture.plan(r, &GRANITE_HYBRID_EXPERTS)? })
        }
    };
    let rotated = match r.value("position_embedding_type") {
        Some(value) if value == "rope" => true,
        None => false,
        Some(value) if value == "nope" => false,
        Some(found) => {
            let (key, expected) = ("position_embedding_type".to_string(), "`rope`, `nope` or null".to_string());
            return r.refuse(Reason::BadValue { key, expected, found: found.to_string() });
        }
    };
    // Also where there is no rotary embedding: the parameters have to be sound.
    let rope = rope::flat(r, &rope_rules(&s))?;
    let (norm, out_bias) = (Some((scalars.eps as f32, false)), mamba.in_bias);
    let plan = plan(&s, &GRANITE_NAMES, scalars, rope);
    let ropes = if rotated { plan.ropes.clone() } else { vec![] };
    Some(factors.on(Plan {
        qkv_bias: bias,
        o_bias: bias,
        ropes,
        layers: uniform(s.layers, rotated.then_some(RopeId(0)), None),
        experts,
        mamba: Some(MambaPlan { norm, out_bias, ..mamba }),
        ..plan
    }))
}

static FALCON_NAMES: Names = Names {
    final_norm: "model.final_layernorm",
    mlp_norm: Some("pre_ff_layernorm"),
    gate: Some("feed_forward.gate_proj"),
    up: "feed_forward.up_proj",
    down: "feed_forward.down_proj",
    ..LLAMA_NAMES
};

fn falcon_h1(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let (bias, mlp_bias) = (r.flag("attention_bias", false), r.flag("mlp_bias", false));
    let defaults = ShapeDefaults {
        class: "FalconH1ForCausalLM",
        positions: 8192,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let expanded = expanded(r, s.hidden);
    let inner = match r.count_or_null("mamba_d_ssm") {
        Answer::Is(inner) => inner,
        Answer::Absent => 1024,
        Answer::Null => expanded,
    };
    let mamba = mamba(r, vec![true; s.layers as usize], inner, scalars.act)?;
    let (normed, before_gate) = (r.flag("mamba_rms_norm", false), r.flag("mamba_norm_before_gate", true));
    let out_bias = r.flag("projectors_bias", false);
    let mut factor = |key: &'static str| r.positive(key, 1.0) as f32;
    let (embed_scale, logits_scale) = (factor("embedding_multiplier"), factor("lm_head_multiplier"));
    let attention = ["attention_in_multiplier", "attention_out_multiplier"].map(&mut factor);
    let [input_scale, output_scale] = ["ssm_in_multiplier", "ssm_out_multiplier"].map(&mut factor);
    let key_scale = r.positive("key_multiplier", 1.0);
    let (scales, mlp_scales) = (r.factors("ssm_multipliers"), r.factors("mlp_multipliers"));
    let rope = rope::flat(r, &rope_rules(&s))?;
    let norm = normed.then_some((scalars.eps as f32, before_gate));
    let mamba = MambaPlan { beside: Some(attention), out_bias, norm, input_scale, scales, output_scale, ..mamba };
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        mlp_bias,
        embed_scale,
        logits_scale,
        attn_scale: (f64::from(s.head_dim).powf(-0.5) * key_scale) as f32,
        mamba: Some(mamba),
        mlp_scales: Some(mlp_scales).filter(|scales| *scales != [1.0; 2]),
        ..plan(&s, &FALCON_NAMES, scalars, rope)
    })
}

static NEMOTRON_NAMES: Names = Names {
    embed: "model.embeddings.weight",
    final_norm: "model.norm_f",
    attn_norm: Some("norm"),
    mlp_norm: Some("norm"),
    projections: Projections::Separate { q: "mixer.q_proj", k: "mixer.k_proj", v: "mixer.v_proj" },
    o: "mixer.o_proj",
    gate: None,
    up: "mixer.up_proj",
    down: "mixer.down_proj",
    ..LLAMA_NAMES
};

static NEMOTRON_EXPERTS: ExpertNames = ExpertNames {
    router: &["mixer.gate"],
    correction: &["mixer.gate.e_score_correction_bias"],
    correction_row: false,
    each: Some(Each { gate: None, up: "mixer.experts.{expert}.up_proj", down: "mixer.experts.{expert}.down_proj" }),
    stacked: &[Stacked { gate_up: GateUp::Up("mixer.experts.up_proj"), down: "mixer.experts.down_proj", ..STACKED }],
    shared: &[SharedNames { gate: None, up: "mixer.shared_experts.up_proj", down: "mixer.shared_experts.down_proj" }],
    shared_gate: "",
};

const BACKBONE: Prefix = Prefix { model: "backbone.", head: "" };
/// What predicts further tokens.
const MTP: Ahead = Ahead { layers: 0, prefix: Some("mtp."), is_joined: false };

/// A block of Nemotron-H: a mixer, or what follows one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

impl Kind {
    fn of_word(word: &str) -> Option<Kind> {
        Some(match word {
            "linear_attention" | "mamba" | "M" => Kind::Mamba,
            "full_attention" | "attention" | "*" => Kind::Attention,
            "mlp" | "-" => Kind::Mlp,
            "moe" | "E" => Kind::Experts,
            _ => return None,
        })
    }

    /// The kinds of all blocks, by a list of words or by letters.
    fn all(value: &Value) -> Option<Vec<Kind>> {
        match value {
            Value::String(letters) => letters.chars().map(|letter| Kind::of_word(&letter.to_string())).collect(),
            Value::Array(words) => words.iter().map(|word| Kind::of_word(word.as_str()?)).collect(),
            _ => None,
        }
    }
}

/// The kinds of all blocks; `None`: they are refused.
fn kinds(r: &mut Reader) -> Option<Vec<Kind>> {
    let mut known: Option<(&str, Vec<Kind>)> = None;
    for key in ["layers_block_type", "layer_types", "hybrid_override_pattern"] {
        let Some(value) = r.value(key) else { continue };
        let pattern = key == "hybrid_override_pattern";
        let kinds = Kind::all(value)
            .filter(|kinds| value.is_string() == pattern && (1..=LAYERS_MAX as usize).contains(&kinds.len()));
        let Some(kinds) = kinds else {
            let words = if pattern { "M, *, - and E" } else { "linear_attention, full_attention, mlp and moe" };
            let (key, expected) = (key.to_string(), format!("1 to {LAYERS_MAX} blocks of {words}"));
            return r.refuse(Reason::BadValue { key, expected, found: value.to_string() });
        };
        match &known {
            Some((first, others)) if *others != kinds => {
                let (first, second) = (first.to_string(), key.to_string());
                return r.refuse(Reason::Conflict { first, second, detail: "they list other blocks".to_string() });
            }
            Some(_) => {}
            None => known = Some((key, kinds)),
        }
    }
    let Some((key, kinds)) = known else {
        return r.refuse(Reason::MissingKey { key: "layers_block_type".to_string() });
    };
    let count = r.value("num_hidden_layers");
    if let Some(count) = count.filter(|count| count.as_u64() != Some(kinds.len() as u64)) {
        let (first, second) = ("num_hidden_layers".to_string(), key.to_string());
        return r.refuse(Reason::Conflict { first, second, detail: format!("{count} and {} blocks", kinds.len()) });
    }
    Some(kinds)
}

/// Blocks joined to layers: a mixer and what follows it, if that is no mixer, too.
fn layers_of(r: &mut Reader, kinds: &[Kind]) -> Option<Vec<Block>> {
    let mut blocks: Vec<Block> = vec![];
    for (at, kind) in (0..).zip(kinds) {
        match (kind, blocks.last_mut()) {
            (Kind::Mamba | Kind::Attention, _) => blocks.push(Block { mixer: at, feed: None }),
            (Kind::Mlp | Kind::Experts, Some(Block { feed: feed @ None, .. })) => *feed = Some(at),
            (Kind::Mlp | Kind::Experts, _) => {
                let expected = "Mamba-2 or attention right before every `mlp` and `moe`".to_string();
                let (key, found) = ("layers_block_type".to_string(), format!("none before block {at}"));
                return r.refuse(Reason::BadValue { key, expected, found });
            }
        }
    }
    Some(blocks)
}

fn nemotron_h(r: &mut Reader) -> Option<Plan> {
    let kinds = kinds(r)?;
    let blocks = layers_of(r, &kinds)?;
    let defaults = ShapeDefaults {
        class: "NemotronHForCausalLM",
        positions: 4096,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Default(128),
    };
    let width = |r: &mut Reader| r.count("intermediate_size", 21_504, EXTENT_MAX);
    let s = shape_by(r, defaults, |_| blocks.len() as u32, width)?;
    let named = r.value("attention_head_dim");
    if let Some(named) = named.filter(|named| named.as_u64() != Some(u64::from(s.head_dim))) {
        let (first, second) = ("attention_head_dim".to_string(), "head_dim".to_string());
        return r.refuse(Reason::Conflict { first, second, detail: format!("{named} and {}", s.head_dim) });
    }
    let eps = r.positive("layer_norm_epsilon", 1e-5);
    let is = |at: Option<u32>, kind: Kind| at.is_some_and(|at| kinds[at as usize] == kind);
    unlimited(r);
    let extents = Extents {
        heads: ("mamba_num_heads", r.count("mamba_num_heads", 128, EXTENT_MAX)),
        head_dim: ("mamba_head_dim", r.count("mamba_head_dim", 64, EXTENT_MAX)),
        groups: ("n_groups", r.count("n_groups", 8, EXTENT_MAX)),
        state: ("ssm_state_size", r.count("ssm_state_size", 128, EXTENT_MAX)),
        kernel: ("conv_kernel", r.count("conv_kernel", 4, KERNEL_MAX)),
    };
    let with_mamba = blocks.iter().map(|block| is(Some(block.mixer), Kind::Mamba)).collect();
    let mamba = extents.plan(r, with_mamba, "mixer")?;
    let (conv_bias, bias) = (r.flag("use_conv_bias", true), r.flag("use_bias", false));
    let router = GroupedRouter::read_alone(r, (8, 2, 7688, true));
    let shared = r.count("moe_shared_expert_intermediate_size", 7688, EXTENT_MAX);
    let experts = match kinds.contains(&Kind::Experts) {
        false => None,
        true => {
            let with: Vec<bool> = blocks.iter().map(|block| is(block.feed, Kind::Experts)).collect();
            let experts = router.plan_in(r, with, &NEMOTRON_EXPERTS)?;
            let shared = Some(SharedPlan { width: shared, gated: false, scale: 1.0 });
            Some(ExpertsPlan { gated: false, shared, ..experts })
        }
    };
    let mut notes = vec![];
    let least = r.value("time_step_min").map(Value::as_f64);
    if let Some(None) = least {
        let (key, expected) = ("time_step_min".to_string(), "a number".to_string());
        return r.refuse(Reason::BadValue { key, expected, found: "another value".to_string() });
    }
    let raised = least.flatten() != Some(0.0);
    if raised && kinds.contains(&Kind::Mamba) {
        notes.push(
            "steps of Mamba-2 have no limits, as `time_step_limit` says; transformers 5 raises those below `time_step_min` in a prompt, \
             and not in the tokens after it"
                .to_string(),
        );
    }
    let scalars = Scalars { tied: r.flag("tie_word_embeddings", false), act: Act::SquaredRelu, eps };
    // Attention has no rotary embedding.
    let rope = Rope { inv_freq: vec![], scale: 1.0, interleaved: false };
    let rope = ResolvedRope { rope, positions_max: s.positions_max, note: None };
    Some(Plan {
        notes,
        prefix: BACKBONE,
        ropes: vec![],
        layers: uniform(s.layers, None, None),
        gated: false,
        experts,
        ahead: MTP,
        mamba: Some(MambaPlan { conv_bias, in_bias: bias, out_bias: bias, norm: Some((eps as f32, false)), ..mamba }),
        blocks: Some(blocks),
        ..plan(&s, &NEMOTRON_NAMES, scalars, rope)
    })
}
