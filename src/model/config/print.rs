//! Owns the text forms of a model graph: the complete text that is hashed, and the summary for people.

use std::fmt::Write;

use crate::dtype::{DType, Precision};
use crate::model::graph::{
    Act, Attention, ClampedSwiglu, ExpertGroups, Experts, FeedForward, GatedDelta, GatedNorm, GroupScore, Joined,
    Layer, Linear, Mamba2, Mixer, Mlp, ModelGraph, Norm, NormKind, QkNorm, QkNormSpan, QueryScale, Rope, Router,
    RowView, ScaledMlp, Score, SharedExpert, ShortConv, SideBySide, Tensor, TensorId,
};

/// Every field of the graph as text: deterministic, complete, one fact per word. The text that is shown is the text that is hashed.
///
/// Structs are taken apart field by field, so that a new field does not compile until it is printed.
pub fn graph_text(graph: &ModelGraph) -> String {
    let ModelGraph {
        family,
        hidden,
        vocab,
        positions_max,
        tensors,
        formats,
        embed,
        embed_scale,
        joined,
        ropes,
        layers,
        final_norm,
        head,
        logits_scale,
        logits_softcap,
        eos,
        bos,
    } = graph;
    let mut out = String::new();
    line(&mut out, format_args!("model {family}"));
    line(&mut out, format_args!("hidden {hidden} vocab {vocab} positions_max {positions_max}"));
    let eos: Vec<String> = eos.iter().map(u32::to_string).collect();
    line(&mut out, format_args!("bos {} eos [{}]", option(bos), eos.join(" ")));
    line(&mut out, format_args!("embed {embed} scale {embed_scale:?}"));
    if let Some(joined) = joined {
        let Joined { embedding_norm, given_norm, of_embedding, of_given } = &**joined;
        let (embedding, given) = (norm_text(embedding_norm), norm_text(given_norm));
        line(&mut out, format_args!("joined embedding {embedding} by {}", linear_text(of_embedding)));
        line(&mut out, format_args!("joined given {given} by {}", linear_text(of_given)));
    }
    for (i, Rope { inv_freq, scale, interleaved }) in ropes.iter().enumerate() {
        let pairs = if *interleaved { "neighbours" } else { "halves" };
        let freqs: Vec<String> = inv_freq.iter().map(|f| format!("{f:?}")).collect();
        line(&mut out, format_args!("rope r{i} pairs {pairs} scale {scale:?} inv_freq [{}]", freqs.join(" ")));
    }
    for (i, layer) in layers.iter().enumerate() {
        line(&mut out, format_args!("layer {i}"));
        layer_text(&mut out, layer);
    }
    line(&mut out, format_args!("final_norm {}", norm_text(final_norm)));
    line(&mut out, format_args!("head {}", linear_text(head)));
    line(&mut out, format_args!("logits scale {logits_scale:?} softcap {}", option_float(logits_softcap)));
    for (i, Tensor { name, dtype, shape }) in tensors.iter().enumerate() {
        let shape: Vec<String> = shape.iter().map(u32::to_string).collect();
        line(&mut out, format_args!("tensor w{i} {dtype} [{}] {name}", shape.join(" ")));
    }
    for (tensor, format) in formats {
        line(&mut out, format_args!("format {tensor} {format}"));
    }
    out
}

fn line(out: &mut String, text: std::fmt::Arguments) {
    let _ = writeln!(out, "{text}");
}

fn option<T: std::fmt::Display>(value: &Option<T>) -> String {
    value.as_ref().map_or("none".to_string(), T::to_string)
}

/// `{:?}` of a float is its shortest text that reads back as the same bits.
fn option_float(value: &Option<f32>) -> String {
    value.map_or("none".to_string(), |x| format!("{x:?}"))
}

fn layer_text(out: &mut String, layer: &Layer) {
    let Layer { attn_norm, mixer, attn_post_norm, mlp_norm, feed, mlp_post_norm, parallel, residual_scale } = layer;
    let branches = if *parallel { "parallel" } else { "sequential" };
    line(out, format_args!("  branches {branches} residual_scale {residual_scale:?}"));
    let norm = |norm: &Option<Norm>| norm.as_ref().map_or("none".to_string(), norm_text);
    line(out, format_args!("  attn_norm {}", norm(attn_norm)));
    match mixer {
        Mixer::Attention(attention) => attention_text(out, attention),
        Mixer::GatedDelta(net) => delta_text(out, net),
        Mixer::ShortConv(conv) => short_conv_text(out, conv),
        Mixer::Mamba2(mamba) => mamba_text(out, mamba),
        Mixer::SideBySide(both) => {
            let SideBySide { attention, attention_scales: [input, output], mamba } = &**both;
            line(out, format_args!("  side_by_side attention input_scale {input:?} output_scale {output:?}"));
            attention_text(out, attention);
            mamba_text(out, mamba);
        }
    }
    line(out, format_args!("  attn_post_norm {}", norm(attn_post_norm)));
    line(out, format_args!("  mlp_norm {}", norm(mlp_norm)));
    match feed {
        FeedForward::None => line(out, format_args!("  no mlp")),
        FeedForward::Dense(mlp) => mlp_text(out, "mlp", mlp),
        FeedForward::Scaled(scaled) => {
            let ScaledMlp { mlp, gate_scale, down_scale } = &**scaled;
            mlp_text(out, "mlp", mlp);
            line(out, format_args!("    gate_scale {gate_scale:?} down_scale {down_scale:?}"));
        }
        FeedForward::Experts(experts) => experts_text(out, experts),
    }
    line(out, format_args!("  mlp_post_norm {}", norm(mlp_post_norm)));
}

fn mlp_text(out: &mut String, name: &str, mlp: &Mlp) {
    let Mlp { act, gate, up, down, swiglu } = mlp;
    line(out, format_args!("  {name} act {}", act_name(*act)));
    if let Some(ClampedSwiglu { alpha, limit }) = swiglu {
        line(out, format_args!("    swiglu alpha {alpha:?} limit {limit:?}"));
    }
    line(out, format_args!("    gate {}", gate.as_ref().map_or("none".to_string(), linear_text)));
    line(out, format_args!("    up {}", linear_text(up)));
    line(out, format_args!("    down {}", linear_text(down)));
}

fn experts_text(out: &mut String, experts: &Experts) {
    let Experts { router, experts, shared } = experts;
    let Router { linear, top_k, score, correction, groups, normalise, scale } = router;
    let groups = match groups {
        None => "none".to_string(),
        Some(ExpertGroups { count, kept, score }) => format!("{kept} of {count} by {}", group_score_name(*score)),
    };
    line(
        out,
        format_args!(
            "  router top {top_k} score {} correction {} groups {groups} normalise {} scale {scale:?}",
            score_name(*score),
            option(correction),
            option_float(normalise)
        ),
    );
    line(out, format_args!("    linear {}", linear_text(linear)));
    for (id, expert) in experts.iter().enumerate() {
        mlp_text(out, &format!("expert {id}"), expert);
    }
    if let Some(SharedExpert { mlp, gate, scale }) = shared {
        mlp_text(out, "shared expert", mlp);
        line(
            out,
            format_args!("    scale {scale:?} sigmoid {}", gate.as_ref().map_or("none".to_string(), linear_text)),
        );
    }
}

fn score_name(score: Score) -> &'static str {
    match score {
        Score::Softmax => "softmax",
        Score::Sigmoid => "sigmoid",
    }
}

fn group_score_name(score: GroupScore) -> &'static str {
    match score {
        GroupScore::Max => "max",
        GroupScore::SumOfTwo => "sum_of_two",
    }
}

fn attention_text(out: &mut String, attention: &Attention) {
    let Attention {
        heads,
        kv_heads,
        head_dim,
        q,
        k,
        v,
        o,
        q_norm,
        k_norm,
        rope,
        scale,
        softcap,
        window,
        cache_scales,
        sinks,
        gate,
        query_scale,
        norm_after_rope,
    } = attention;
    let qk_norm = |norm: &Option<QkNorm>| match norm {
        None => "none".to_string(),
        Some(QkNorm { kind, eps, weights, weight_offset, span }) => {
            let span = match span {
                QkNormSpan::Head => "per head",
                QkNormSpan::OwnGains => "per head with own gains",
                QkNormSpan::Projection => "whole",
            };
            let weights: Vec<String> = weights.iter().map(ToString::to_string).collect();
            let (kind, weights) = (norm_kind(*kind), weights.join(" "));
            format!("{span} {kind} eps {eps:?} weight {weights} offset {weight_offset:?}")
        }
    };
    line(
        out,
        format_args!(
            "  attn heads {heads} kv_heads {kv_heads} head_dim {head_dim} rope {} scale {scale:?} softcap {} window {}",
            option(rope),
            option_float(softcap),
            option(window)
        ),
    );
    for (name, linear) in [("q", q), ("k", k), ("v", v), ("o", o)] {
        line(out, format_args!("    {name} {}", linear_text(linear)));
    }
    line(out, format_args!("    q_norm {}", qk_norm(q_norm)));
    line(out, format_args!("    k_norm {}", qk_norm(k_norm)));
    if let Some([keys, values]) = cache_scales {
        line(out, format_args!("    cache_scales {keys} {values}"));
    }
    if let Some(sinks) = sinks {
        line(out, format_args!("    sinks {sinks}"));
    }
    if let Some(gate) = gate {
        line(out, format_args!("    output gate {}", linear_text(gate)));
    }
    if let Some(QueryScale { beta, original }) = query_scale {
        line(out, format_args!("    query_scale beta {beta:?} original {original}"));
    }
    if *norm_after_rope {
        line(out, format_args!("    q_norm and k_norm after rope"));
    }
}

fn delta_text(out: &mut String, net: &GatedDelta) {
    let GatedDelta {
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
    } = net;
    let doubled = if *negative_eigenvalues { " beta doubled" } else { "" };
    line(
        out,
        format_args!(
            "  gated_delta key_heads {key_heads} key_dim {key_dim} value_heads {value_heads} value_dim {value_dim} taps {kernel}{doubled}"
        ),
    );
    for (name, linear) in [("q", q), ("k", k), ("v", v), ("z", z), ("b", b), ("a", a), ("o", o)] {
        line(out, format_args!("    {name} {}", linear_text(linear)));
    }
    let conv: Vec<String> = conv.iter().map(ToString::to_string).collect();
    line(out, format_args!("    conv {} a_log {a_log} dt_bias {dt_bias}", conv.join(" ")));
    line(out, format_args!("    norm {}", norm_text(norm)));
}

fn short_conv_text(out: &mut String, conv: &ShortConv) {
    let ShortConv { kernel, b, c, h, conv, conv_bias, o } = conv;
    line(out, format_args!("  short_conv taps {kernel}"));
    for (name, linear) in [("b", b), ("c", c), ("h", h), ("o", o)] {
        line(out, format_args!("    {name} {}", linear_text(linear)));
    }
    line(out, format_args!("    conv {conv} bias {}", option(conv_bias)));
}

fn mamba_text(out: &mut String, mamba: &Mamba2) {
    let Mamba2 {
        heads,
        head_dim,
        groups,
        state,
        kernel,
        z,
        h,
        b,
        c,
        dt,
        input_scale,
        scales,
        conv,
        conv_bias,
        a_log,
        d,
        dt_bias,
        norm,
        o,
        output_scale,
    } = mamba;
    line(out, format_args!("  mamba2 heads {heads} head_dim {head_dim} groups {groups} state {state} taps {kernel}"));
    for (name, linear) in [("z", z), ("h", h), ("b", b), ("c", c), ("dt", dt), ("o", o)] {
        line(out, format_args!("    {name} {}", linear_text(linear)));
    }
    let scales = scales.map(|scale| format!("{scale:?}")).join(" ");
    line(out, format_args!("    scales input {input_scale:?} parts [{scales}] output {output_scale:?}"));
    line(out, format_args!("    conv {conv} bias {} a_log {a_log} d {d} dt_bias {dt_bias}", option(conv_bias)));
    match norm {
        None => line(out, format_args!("    gate without a norm")),
        Some(GatedNorm { norm, groups, before_gate }) => {
            let order = if *before_gate { "before" } else { "after" };
            line(out, format_args!("    norm {order} the gate groups {groups} {}", norm_text(norm)));
        }
    }
}

fn norm_text(norm: &Norm) -> String {
    let Norm { kind, eps, weight, weight_offset, bias } = norm;
    let kind = norm_kind(*kind);
    format!("{kind} eps {eps:?} weight {} offset {weight_offset:?} bias {}", option(weight), option(bias))
}

fn norm_kind(kind: NormKind) -> &'static str {
    match kind {
        NormKind::Rms => "rms",
        NormKind::Layer => "layer",
    }
}

fn linear_text(linear: &Linear) -> String {
    let Linear { weight, bias, rows, cols } = linear;
    format!("[{rows} {cols}] {} bias {}", view_text(weight), bias.as_ref().map_or("none".to_string(), view_text))
}

fn view_text(view: &RowView) -> String {
    let RowView { tensor, first, block, stride } = view;
    format!("{tensor} first {first} block {block} stride {stride}")
}

fn act_name(act: Act) -> &'static str {
    match act {
        Act::Silu => "silu",
        Act::GeluErf => "gelu_erf",
        Act::GeluTanh => "gelu_tanh",
        Act::Relu => "relu",
        Act::SquaredRelu => "relu2",
    }
}

/// Weight bytes that one decode step has to read; see [`ModelGraph::step_bytes`].
pub fn step_weight_bytes(graph: &ModelGraph, precision: Precision) -> u64 {
    graph.step_bytes(precision.weights, 1)
}

/// Cache bytes that one decode step has to read with `positions` in the cache; a window bounds what its layer reads.
pub fn step_cache_bytes(graph: &ModelGraph, precision: Precision, positions: u32) -> u64 {
    let values: u64 = graph
        .layers
        .iter()
        .map(|layer| {
            let Some(attn) = layer.history() else { return 0 };
            let seen = attn.window.map_or(positions, |window| positions.min(window));
            2 * u64::from(attn.kv_heads) * u64::from(attn.head_dim) * u64::from(seen)
        })
        .sum();
    values * precision.cache.bytes() as u64
}

/// What the model is, what each group of equal layers does, and what a decode step reads; for people.
pub fn describe(graph: &ModelGraph) -> String {
    let mut out = String::new();
    let has_experts = graph.has_experts();
    let active =
        if has_experts { format!(", {} in a step", count_text(graph.active_parameters())) } else { String::new() };
    line(
        &mut out,
        format_args!(
            "{}: {} parameters{active}, {} layers, hidden {}, vocab {}, up to {} positions",
            graph.family,
            count_text(graph.parameter_count()),
            graph.layers.len(),
            graph.hidden,
            graph.vocab,
            graph.positions_max
        ),
    );
    let bytes = bytes_text(graph.stored_bytes());
    line(&mut out, format_args!("weights stored as {}, {bytes}", stored_formats(graph).join(" and ")));
    let scale = scale_text("scaled by", graph.embed_scale);
    let tied = if graph.head.weight.tensor == graph.embed { ", tied to the head" } else { "" };
    line(&mut out, format_args!("embedding{tied}{scale}"));
    for (i, rope) in graph.ropes.iter().enumerate() {
        let pairs = if rope.interleaved { "neighbouring" } else { "half-split" };
        let (count, scale) = (rope.inv_freq.len(), scale_text("scaled by", rope.scale));
        let slowest = rope.inv_freq.last().copied().unwrap_or_default();
        line(&mut out, format_args!("rope r{i}: {count} {pairs} pairs, slowest frequency {slowest:e}{scale}"));
    }
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (i, layer) in graph.layers.iter().enumerate() {
        let text = describe_layer(layer);
        match groups.iter_mut().find(|(known, _)| *known == text) {
            Some((_, members)) => members.push(i),
            None => groups.push((text, vec![i])),
        }
    }
    for (text, members) in groups {
        let plural = if members.len() == 1 { "layer" } else { "layers" };
        out.push_str(&format!("{plural} {}:\n{text}", ranges(&members)));
    }
    let softcap = graph.logits_softcap.map(|cap| format!(", softcap {cap}")).unwrap_or_default();
    let scale = scale_text("scaled by", graph.logits_scale);
    line(&mut out, format_args!("then {}, head{scale}{softcap}", describe_norm(&graph.final_norm)));
    for (name, weights) in [("bf16", DType::Bf16), ("fp32", DType::F32)] {
        let precision = Precision { weights, cache: weights, wire: DType::F32 };
        let (bytes, per_1024) =
            (step_weight_bytes(graph, precision), step_cache_bytes(graph, precision, 1024.min(graph.positions_max)));
        line(
            &mut out,
            format_args!(
                "a step in {name} reads {} of weights and, at context {}, {} of cache",
                bytes_text(bytes),
                1024.min(graph.positions_max),
                bytes_text(per_1024)
            ),
        );
    }
    if has_experts {
        let of = |rows: u32| format!("{} for {rows} rows", bytes_text(graph.step_bytes(DType::Bf16, rows)));
        let several = [8, 32, 128].map(of).join(", ");
        line(&mut out, format_args!("in bf16, with experts chosen uniformly: {several}"));
    }
    out
}

/// The formats of all tensors as they are stored, each once.
fn stored_formats(graph: &ModelGraph) -> Vec<String> {
    let kind = |(id, tensor): (TensorId, &Tensor)| match graph.formats.get(&id) {
        Some(format) => format.to_string(),
        None => tensor.dtype.to_string(),
    };
    let mut stored: Vec<String> = (0..).map(TensorId).zip(&graph.tensors).map(kind).collect();
    stored.sort_unstable();
    stored.dedup();
    stored
}

fn describe_layer(layer: &Layer) -> String {
    let mut out = String::new();
    let norm = |norm: &Option<Norm>| norm.as_ref().map(|n| format!("{}, ", describe_norm(n))).unwrap_or_default();
    let post = |norm: &Option<Norm>| norm.as_ref().map(|n| format!(", {}", describe_norm(n))).unwrap_or_default();
    let mixer = match &layer.mixer {
        Mixer::Attention(attention) => describe_attention(attention),
        Mixer::GatedDelta(net) => describe_delta(net),
        Mixer::ShortConv(conv) => describe_short_conv(conv),
        Mixer::Mamba2(mamba) => describe_mamba(mamba),
        Mixer::SideBySide(both) => {
            let SideBySide { attention, attention_scales: [input, output], mamba } = &**both;
            let scales = scale_text("its input scaled by", *input) + &scale_text("its output scaled by", *output);
            format!("{}{scales}; beside it {}", describe_attention(attention), describe_mamba(mamba))
        }
    };
    line(&mut out, format_args!("  {}{mixer}{}", norm(&layer.attn_norm), post(&layer.attn_post_norm)));
    let feed = match &layer.feed {
        FeedForward::None => "nothing after it".to_string(),
        FeedForward::Dense(mlp) => describe_mlp(mlp),
        FeedForward::Scaled(scaled) => {
            let ScaledMlp { mlp, gate_scale, down_scale } = &**scaled;
            let gate = scale_text("its gate scaled by", *gate_scale);
            describe_mlp(mlp) + &gate + &scale_text("its output scaled by", *down_scale)
        }
        FeedForward::Experts(experts) => describe_experts(experts),
    };
    line(&mut out, format_args!("  {}{feed}{}", norm(&layer.mlp_norm), post(&layer.mlp_post_norm)));
    let order = if layer.parallel { "both branches read the layer's input" } else { "" };
    let scale = scale_text("branches scaled by", layer.residual_scale);
    if !order.is_empty() || !scale.is_empty() {
        line(&mut out, format_args!("  {}", format!("{order}{scale}").trim_start_matches(", ")));
    }
    out
}

fn describe_attention(attn: &Attention) -> String {
    let mut traits = Vec::new();
    let biases: Vec<&str> = [("q", &attn.q), ("k", &attn.k), ("v", &attn.v), ("o", &attn.o)]
        .into_iter()
        .filter_map(|(name, linear)| linear.bias.is_some().then_some(name))
        .collect();
    if !biases.is_empty() {
        traits.push(format!("bias on {}", biases.join(", ")));
    }
    if let Some(qk) = &attn.q_norm {
        let span = match qk.span {
            QkNormSpan::Head => "each head",
            QkNormSpan::OwnGains => "each head, with gains of its own",
            QkNormSpan::Projection => "the whole projection",
        };
        let after = if attn.norm_after_rope { ", after the rotation" } else { "" };
        traits.push(format!("q and k normed over {span}{after}"));
    }
    traits.push(attn.rope.map_or("no rotary embedding".to_string(), |rope| format!("rope {rope}")));
    traits.push(attn.window.map_or("full".to_string(), |window| format!("window {window}")));
    traits.push(format!("scale {}", attn.scale));
    if let Some(cap) = attn.softcap {
        traits.push(format!("softcap {cap}"));
    }
    if attn.sinks.is_some() {
        traits.push("a sink for each head".to_string());
    }
    if let Some(gate) = &attn.gate {
        let bias = if gate.bias.is_some() { " with bias" } else { "" };
        traits.push(format!("output gate{bias}"));
    }
    if let Some(QueryScale { beta, original }) = attn.query_scale {
        traits.push(format!("queries scaled by position (beta {beta}, from {original})"));
    }
    let Attention { heads, kv_heads, head_dim, .. } = attn;
    format!("attention of {heads} query and {kv_heads} kv heads, {head_dim} wide ({})", traits.join(", "))
}

fn describe_delta(net: &GatedDelta) -> String {
    let GatedDelta { key_heads, value_heads, key_dim, value_dim, kernel, negative_eigenvalues, .. } = net;
    let doubled = if *negative_eigenvalues { ", beta doubled" } else { "" };
    let state = bytes_text(4 * net.state_values());
    format!(
        "gated delta net of {key_heads} key heads, {key_dim} wide, and {value_heads} value heads, {value_dim} wide ({kernel} taps{doubled}, \
         {state} of state in fp32)"
    )
}

fn describe_short_conv(conv: &ShortConv) -> String {
    let bias = if conv.conv_bias.is_some() { ", bias" } else { "" };
    let state = bytes_text(4 * conv.state_values());
    format!("gated short convolution of {} taps ({state} of state in fp32{bias})", conv.kernel)
}

fn describe_mamba(mamba: &Mamba2) -> String {
    let Mamba2 { heads, head_dim, groups, state, kernel, norm, .. } = mamba;
    let plural = if *groups == 1 { "group" } else { "groups" };
    let gate = match norm {
        None => ", gate without a norm".to_string(),
        Some(GatedNorm { before_gate: true, .. }) => ", norm before the gate".to_string(),
        Some(_) => String::new(),
    };
    let scaled = mamba.scales != [1.0; 5] || mamba.input_scale != 1.0 || mamba.output_scale != 1.0;
    let scaled = if scaled { ", with factors" } else { "" };
    let bytes = bytes_text(4 * mamba.state_values());
    format!(
        "Mamba-2 of {heads} heads, {head_dim} wide, and {groups} {plural} of {state} states ({kernel} taps{gate}{scaled}, {bytes} of \
         state in fp32)"
    )
}

fn describe_mlp(mlp: &Mlp) -> String {
    let kind = if mlp.gate.is_some() { "gated " } else { "" };
    let bias = if mlp.up.bias.is_some() { ", bias" } else { "" };
    let clamped = mlp.swiglu.map(|ClampedSwiglu { limit, .. }| format!(", clamped at {limit}")).unwrap_or_default();
    format!("{kind}mlp {} wide ({}{clamped}{bias})", mlp.up.rows, act_name(mlp.act))
}

fn describe_experts(experts: &Experts) -> String {
    let Experts { router, experts, shared } = experts;
    let mut traits = vec![score_name(router.score).to_string()];
    if router.correction.is_some() {
        traits.push("corrected for the choice".to_string());
    }
    if let Some(ExpertGroups { count, kept, .. }) = router.groups {
        traits.push(format!("from {kept} of {count} groups"));
    }
    if router.normalise.is_some() {
        traits.push("normalised".to_string());
    }
    if router.scale != 1.0 {
        traits.push(format!("scaled by {}", router.scale));
    }
    let each = experts.first().map(|expert| format!(", each a {}", describe_mlp(expert))).unwrap_or_default();
    let shared = shared.as_ref().map(|SharedExpert { mlp, gate, scale }| {
        let (gate, scale) = (if gate.is_some() { ", gated" } else { "" }, scale_text("scaled by", *scale));
        format!("; a shared {}{gate}{scale}", describe_mlp(mlp))
    });
    let (top_k, shared) = (router.top_k, shared.unwrap_or_default());
    format!("{top_k} of {} experts ({}){each}{shared}", experts.len(), traits.join(", "))
}

fn describe_norm(norm: &Norm) -> String {
    let kind = match norm.kind {
        NormKind::Rms => "RMS norm",
        NormKind::Layer => "LayerNorm",
    };
    let offset = if norm.weight_offset == 0.0 { String::new() } else { format!(" ({} + w)", norm.weight_offset) };
    format!("{kind}{offset}")
}

fn scale_text(what: &str, scale: f32) -> String {
    if scale == 1.0 { String::new() } else { format!(", {what} {scale}") }
}

/// `0-3, 5, 7-9`
fn ranges(members: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &member in members {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == member => *last = member,
            _ => parts.push((member, member)),
        }
    }
    let text: Vec<String> =
        parts.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    text.join(", ")
}

fn count_text(count: u64) -> String {
    scaled(count as f64, &[(1e9, "B"), (1e6, "M"), (1e3, "k")], "")
}

fn bytes_text(bytes: u64) -> String {
    scaled(bytes as f64, &[(1e9, " GB"), (1e6, " MB"), (1e3, " kB")], " B")
}

fn scaled(value: f64, units: &[(f64, &str)], plain: &str) -> String {
    match units.iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) => format!("{:.2}{name}", value / unit),
        None => format!("{value}{plain}"),
    }
}
