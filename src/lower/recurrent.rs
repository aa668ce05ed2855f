//! Layers with short convolutions and with Mamba-2, alone or beside attention, and the MLP with factors of Falcon-H1.

use super::mix::in_part;
use super::{Branch, Builder, constant};
use crate::candidate::Infeasible;
use crate::dtype::DType;
use crate::ir::BufferId;
use crate::ir::op::{Access, Convolve, Epilogue, GroupNorm, MatVec, Op, Role, Scan, UNIT_ROWS};
use crate::ir::program::{Cols, Content, LayerOp, Operand, Rows, Second, Site, Space};
use crate::ir::table::Holds;
use crate::model::graph::{GatedNorm, Layer, Linear, Mamba2, Mlp, NormKind, ShortConv, SideBySide, TensorId};

/// How an MLP with factors activates.
///
/// # Errors
/// What programs do not have of it, by name.
pub(super) fn scaled_epilogue(l: usize, layer: &Layer, mlp: &Mlp, scale: f32) -> Result<Epilogue, Infeasible> {
    let refused = |what| Err(Infeasible::Feed { layer: l, what });
    if layer.mlp_post_norm.is_some() {
        return refused("an MLP with factors before a norm");
    }
    match (&mlp.gate, mlp.swiglu) {
        (Some(_), None) => Ok(Epilogue::GatedBy { act: mlp.act, scale }),
        _ => refused("an MLP with factors without a plain gate"),
    }
}

/// Consecutive columns of a buffer, in blocks.
fn part(base: u32, block: u32, cols: u32) -> Cols {
    Cols { base, limit: base + cols, ..Cols::blocks(block, cols) }
}

impl Builder<'_> {
    /// The short convolution of layer `l` over `x`: what its output projection reads.
    ///
    /// # Errors
    /// What programs do not have of it, by name.
    pub(super) fn short_conv(
        &mut self,
        l: usize,
        layer: &Layer,
        conv: &ShortConv,
        x: BufferId,
    ) -> Result<BufferId, Infeasible> {
        let (channels, kernel) = (conv.h.rows, conv.kernel);
        let refused = |what| Err(Infeasible::State { layer: l, what });
        if channels % 2 != 0 {
            return refused("an odd number of channels; packets need an even one");
        }
        if kernel < 2 {
            return refused("a convolution that reads one position alone");
        }
        let op = Convolve { channels, kernel };
        let from = self.project(&format!("in_proj.{l}"), l, layer, &conv.projections(), x);
        let units = |base: u32| part(base, UNIT_ROWS, channels);
        let past = op.past();
        let state = self.state(l, part(0, UNIT_ROWS * past, channels * past));
        let constants = self.convolution(&format!("convolve.{l}"), conv.conv, conv.conv_bias, channels, kernel, true);
        let mixed = self.exchange(&format!("convolve.{l}"), channels);
        let mut operands = vec![
            self.read(Role::X, from, units(2 * channels)),
            self.read(Role::B, from, units(0)),
            self.read(Role::C, from, units(channels)),
        ];
        operands.extend(constants);
        operands.extend([state, self.write(Role::Out, mixed, units(0))]);
        let (site, n) = (Some(Site::of_layer(LayerOp::Attention, l)), channels.div_ceil(UNIT_ROWS));
        self.grid(&format!("convolve.{l}"), site, Op::Convolve(op), n, Second::Axis(1), operands);
        Ok(mixed)
    }

    /// Attention and Mamba-2 of layer `l`, which both read `x`.
    ///
    /// # Errors
    /// What programs do not have of it, by name.
    pub(super) fn side_by_side<'a>(
        &mut self,
        l: usize,
        layer: &Layer,
        both: &'a SideBySide,
        x: BufferId,
        ropes: &[BufferId],
    ) -> Result<Vec<Branch<'a>>, Infeasible> {
        let SideBySide { attention, attention_scales: [input_scale, output_scale], mamba } = both;
        if layer.attn_post_norm.is_some() {
            return Err(Infeasible::State { layer: l, what: "a norm of the sum of attention and Mamba-2" });
        }
        let site = Some(Site::of_layer(LayerOp::Qkv, l));
        let qkv = self.qkv(&format!("qkv.{l}"), site, layer, attention, x);
        self.scale_gains(l, *input_scale)?;
        // All products that read the layer's input come before the mixers.
        let from = self.mamba_inputs(l, layer, mamba, x)?;
        let attended = self.attention(l, attention, qkv, ropes)?;
        let attended = Branch { scale: *output_scale, ..Branch::of(attended, &attention.o) };
        Ok(vec![attended, self.scan(l, mamba, from)?])
    }

    /// Mamba-2 of layer `l` over `x`.
    ///
    /// # Errors
    /// What programs do not have of it, by name.
    pub(super) fn mamba<'a>(
        &mut self,
        l: usize,
        layer: &Layer,
        mamba: &'a Mamba2,
        x: BufferId,
    ) -> Result<Branch<'a>, Infeasible> {
        if layer.attn_post_norm.is_some() && mamba.output_scale != 1.0 {
            return Err(Infeasible::State { layer: l, what: "a factor of its output before a norm" });
        }
        let from = self.mamba_inputs(l, layer, mamba, x)?;
        self.scan(l, mamba, from)
    }

    /// z, x, b, c and the steps of a layer, one after another in one buffer.
    fn mamba_inputs(&mut self, l: usize, layer: &Layer, mamba: &Mamba2, x: BufferId) -> Result<BufferId, Infeasible> {
        let from = self.project(&format!("in_proj.{l}"), l, layer, &mamba.projections(), x);
        self.scale_gains(l, mamba.input_scale)?;
        Ok(from)
    }

    /// What a layer adds to the residual of what [`mamba_inputs`](Self::mamba_inputs) has made.
    fn scan<'a>(&mut self, l: usize, mamba: &'a Mamba2, from: BufferId) -> Result<Branch<'a>, Infeasible> {
        let &Mamba2 { heads, head_dim, groups, state, kernel, scales: [z, x, b, c, step], .. } = mamba;
        let refused = |what| Err(Infeasible::State { layer: l, what });
        if head_dim % 2 != 0 || state % 2 != 0 {
            return refused("heads or states of an odd width; packets need an even one");
        }
        let plain = |of: &GatedNorm| {
            let norm = &of.norm;
            norm.kind == NormKind::Rms && norm.weight.is_some() && norm.bias.is_none()
        };
        if !mamba.norm.as_ref().is_none_or(plain) {
            return refused("a norm beside its gate that is no RMS norm with gains");
        }
        let gated = mamba.norm.as_ref().is_none_or(|norm| !norm.before_gate);
        let op = Scan { heads, head_dim, groups, state, kernel, scales: [x, b, c, step], gate: gated.then_some(z) };
        let (inner, grouped) = (op.inner(), groups * state);
        let of_head = |base: u32| part(base, head_dim, inner);
        let of_group = |base: u32| Cols { div: op.group(), ..part(base, state, grouped) };
        let steps = 2 * (inner + grouped);
        let kept = self.state(l, part(0, op.state_cols(), heads * op.state_cols()));
        let (name, channels) = (format!("scan.{l}"), op.channels());
        let constants = self.convolution(&name, mamba.conv, mamba.conv_bias, channels, kernel, false);
        let of_heads = [(Role::ALog, mamba.a_log), (Role::D, mamba.d), (Role::DtBias, mamba.dt_bias)];
        let of_heads = of_heads.map(|(role, tensor)| {
            let id = self.vector(&format!("{name}.{}", role.name()), tensor, heads, 0.0);
            constant(role, id, Cols::all(heads))
        });
        let mixed = self.exchange(&name, inner);
        let mut operands = vec![
            self.read(Role::X, from, of_head(inner)),
            self.read(Role::B, from, of_group(2 * inner)),
            self.read(Role::C, from, of_group(2 * inner + grouped)),
            self.read(Role::Step, from, Cols { base: steps, limit: steps + heads, ..Cols::all(heads) }),
        ];
        operands.extend(gated.then(|| self.read(Role::Gate, from, of_head(0))));
        operands.extend(constants);
        operands.extend(of_heads);
        let parts = self.parts(heads);
        operands.extend([kept, self.write(Role::Out, mixed, of_head(0))].map(|operand| in_part(parts, operand)));
        let site = Some(Site::of_layer(LayerOp::Attention, l));
        self.grid(&name, site, Op::Scan(op), heads, Second::Axis(parts), operands);

        let branch = Branch { scale: mamba.output_scale, ..Branch::of(mixed, &mamba.o) };
        match &mamba.norm {
            // What reads all columns norms them, too.
            Some(GatedNorm { norm, groups: 1, before_gate: false }) => Ok(Branch { norm: Some(norm), ..branch }),
            Some(GatedNorm { norm, groups, before_gate }) => {
                let op = GroupNorm { width: inner, groups: *groups, eps: norm.eps, gate: before_gate.then_some(z) };
                let of_group = part(0, op.group(), inner);
                let normed = self.exchange(&format!("group_norm.{l}"), inner);
                let mut operands = vec![self.read(Role::X, mixed, of_group)];
                operands.extend(before_gate.then(|| self.read(Role::Gate, from, of_group)));
                operands.extend(
                    self.norm_operands(&format!("group_norm.{l}"), Some(norm), inner)
                        .into_iter()
                        .map(|operand| Operand { cols: of_group, ..operand }),
                );
                operands.push(self.write(Role::Out, normed, of_group));
                self.grid(&format!("group_norm.{l}"), site, Op::GroupNorm(op), *groups, Second::Axis(1), operands);
                Ok(Branch { x: normed, ..branch })
            }
            None => Ok(branch),
        }
    }

    /// A product of the layer's normed input with several linears, one after another.
    fn project(&mut self, name: &str, l: usize, layer: &Layer, linears: &[&Linear], x: BufferId) -> BufferId {
        let cols = linears.iter().map(|linear| linear.rows).sum();
        let to = self.exchange(name, cols);
        let out = vec![self.write(Role::Out, to, Cols::blocks(UNIT_ROWS, cols))];
        let (site, norm) = (Some(Site::of_layer(LayerOp::Qkv, l)), layer.attn_norm.as_ref());
        self.matvec(name, site, x, norm, linears, Epilogue::Store, Second::Axis(1), out);
        to
    }

    /// Multiplies the input of the last grid: the gains of its norm.
    fn scale_gains(&mut self, l: usize, by: f32) -> Result<(), Infeasible> {
        if by == 1.0 {
            return Ok(());
        }
        let grid = self.program.grids.last();
        let rms = grid.filter(
            |grid| matches!(&grid.op, Op::MatVec(MatVec { norm: Some(norm), .. }) if norm.kind == NormKind::Rms),
        );
        let gains = rms.and_then(|grid| grid.operand(Role::NormWeight)).map(|operand| operand.buffer);
        match gains.and_then(|gains| self.program.buffers[gains.index()].content.as_mut()) {
            Some(Content::Vectors { scale, .. }) => {
                *scale = by;
                Ok(())
            }
            _ => Err(Infeasible::State { layer: l, what: "a factor of an input without an RMS norm with gains" }),
        }
    }

    /// The recurrent state of layer `l`: its columns of a launch index.
    fn state(&mut self, l: usize, cols: Cols) -> Operand {
        let sequences = self.program.table(Holds::Sequences).map(|(_, table)| table.bound);
        let (count, rows) = sequences.map_or((1, Rows::One), |bound| (bound, Rows::Sequences));
        let buffer = self.buffer(&format!("state.{l}"), Space::State, DType::F32, count, cols.limit, 1, None);
        Operand { role: Role::State, access: Access::Update, buffer, rows, cols }
    }

    /// The taps of a convolution and its bias: of the units of a launch index, or all of them.
    fn convolution(
        &mut self,
        name: &str,
        taps: TensorId,
        bias: Option<TensorId>,
        channels: u32,
        kernel: u32,
        by_unit: bool,
    ) -> Vec<Operand> {
        let cols = |each: u32| {
            if by_unit { Cols::blocks(UNIT_ROWS * each, channels * each) } else { Cols::all(channels * each) }
        };
        let taps = self.vector(&format!("{name}.conv"), taps, channels * kernel, 0.0);
        let mut operands = vec![constant(Role::Conv, taps, cols(kernel))];
        if let Some(bias) = bias {
            let bias = self.vector(&format!("{name}.bias"), bias, channels, 0.0);
            operands.push(constant(Role::Bias, bias, cols(1)));
        }
        operands
    }
}
