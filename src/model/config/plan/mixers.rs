//! Owns short convolutions and Mamba-2 in a plan: their numbers, the names of their tensors, and their part of the graph.

use super::{Collector, NormPlan, Placed, Plan, assemble_attention};
use crate::model::graph::{GatedNorm, Mamba2, Mixer, NormKind, ShortConv, SideBySide, TensorId};

/// The short convolutions of a model; see [`ShortConv`].
#[derive(Debug, Clone)]
pub struct ConvPlan {
    /// By layer: whether it has one.
    pub layers: Vec<bool>,
    pub kernel: u32,
    /// Of the convolution and both projections.
    pub bias: bool,
    /// Modules of a layer: rows of b, of c and of h in the first.
    pub in_proj: &'static str,
    pub conv: &'static str,
    pub out_proj: &'static str,
}

/// The Mamba-2 layers of a model; see [`Mamba2`].
#[derive(Debug, Clone)]
pub struct MambaPlan {
    /// By layer: whether it has one.
    pub layers: Vec<bool>,
    /// Attention is beside it, with these factors of its input and its output.
    pub beside: Option<[f32; 2]>,
    pub heads: u32,
    pub head_dim: u32,
    pub groups: u32,
    pub state: u32,
    pub kernel: u32,
    pub conv_bias: bool,
    pub in_bias: bool,
    pub out_bias: bool,
    /// Epsilon of the norm beside the gate, and whether it is before the gate.
    pub norm: Option<(f32, bool)>,
    pub input_scale: f32,
    pub scales: [f32; 5],
    pub output_scale: f32,
    /// The module of a layer that has all of it.
    pub module: &'static str,
}

/// Where a checkpoint has the parts of a layer, if each has a block of its own (Nemotron-H).
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub mixer: u32,
    /// `None`: nothing follows the mixer.
    pub feed: Option<u32>,
}

/// The mixer of a layer that has no gated delta net, whose tensors have their names by `path`.
pub fn assemble(c: &mut Collector, plan: &Plan, layer: usize, path: &dyn Fn(&str) -> String) -> Mixer {
    if let Some(conv) = plan.conv.as_ref().filter(|conv| conv.layers[layer]) {
        return Mixer::ShortConv(Box::new(short_conv(c, plan, conv, path)));
    }
    let Some(mamba) = plan.mamba.as_ref().filter(|mamba| mamba.layers[layer]) else {
        return Mixer::Attention(assemble_attention(c, plan, layer, path));
    };
    let Some(attention_scales) = mamba.beside else {
        return Mixer::Mamba2(Box::new(mamba2(c, plan, mamba, path)));
    };
    let attention = assemble_attention(c, plan, layer, path);
    let mamba = mamba2(c, plan, mamba, path);
    Mixer::SideBySide(Box::new(SideBySide { attention, attention_scales, mamba }))
}

fn short_conv(c: &mut Collector, plan: &Plan, conv: &ConvPlan, path: &dyn Fn(&str) -> String) -> ShortConv {
    let ConvPlan { kernel, bias, in_proj, conv, out_proj, .. } = *conv;
    let hidden = plan.hidden;
    let [b, c_gate, h] = [0, 1, 2].map(|part| {
        let placed = Placed::range(3 * hidden, part * hidden);
        c.linear(&path(in_proj), placed, hidden, hidden, bias)
    });
    let (taps, conv_bias) = convolution(c, &path(conv), hidden, kernel, bias);
    let o = c.whole(&path(out_proj), hidden, hidden, bias);
    ShortConv { kernel, b, c: c_gate, h, conv: taps, conv_bias, o }
}

fn mamba2(c: &mut Collector, plan: &Plan, mamba: &MambaPlan, path: &dyn Fn(&str) -> String) -> Mamba2 {
    let &MambaPlan { heads, head_dim, groups, state, kernel, .. } = mamba;
    let named = |name: &str| path(&format!("{}.{name}", mamba.module));
    let (inner, grouped) = (heads * head_dim, groups * state);
    let rows = [inner, inner, grouped, grouped, heads];
    let mut first = 0;
    let [z, h, b, c_part, dt] = rows.map(|own| {
        let placed = Placed::range(rows.iter().sum(), first);
        first += own;
        c.linear(&named("in_proj"), placed, own, plan.hidden, mamba.in_bias)
    });
    let channels = inner + 2 * grouped;
    let (conv, conv_bias) = convolution(c, &named("conv1d"), channels, kernel, mamba.conv_bias);
    let [a_log, d, dt_bias] = ["A_log", "D", "dt_bias"].map(|name| c.want(named(name), &[heads]));
    let norm = mamba.norm.map(|(eps, before_gate)| {
        let plain = NormPlan { kind: NormKind::Rms, eps, weight_offset: 0.0, bias: false };
        GatedNorm { norm: c.norm(&named("norm"), plain, inner), groups, before_gate }
    });
    let o = c.whole(&named("out_proj"), plan.hidden, inner, mamba.out_bias);
    Mamba2 {
        heads,
        head_dim,
        groups,
        state,
        kernel,
        z,
        h,
        b,
        c: c_part,
        dt,
        input_scale: mamba.input_scale,
        scales: mamba.scales,
        conv,
        conv_bias,
        a_log,
        d,
        dt_bias,
        norm,
        o,
        output_scale: mamba.output_scale,
    }
}

/// The taps of a convolution, which the files have with a second extent of 1, as torch has them, and its bias.
fn convolution(
    c: &mut Collector,
    module: &str,
    channels: u32,
    kernel: u32,
    bias: bool,
) -> (TensorId, Option<TensorId>) {
    let name = format!("{module}.weight");
    // A GGUF file leaves the extent of 1 out.
    let is_flat = c.files.and_then(|files| files.get(&name)).is_some_and(|found| found.shape.len() == 2);
    let shape = [channels, kernel];
    let taps = if is_flat { c.want(name, &shape) } else { c.want_as(name, &shape, &[channels, 1, kernel]) };
    (taps, bias.then(|| c.want(format!("{module}.bias"), &[channels])))
}
