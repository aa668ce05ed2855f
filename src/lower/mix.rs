//! Layers with a recurrent state: their projections, and the op that brings the state to the position.

use super::{Builder, constant, format_of};
use crate::candidate::Infeasible;
use crate::dtype::DType;
use crate::ir::BufferId;
use crate::ir::op::{Access, Epilogue, Mix, Op, Role, UNIT_ROWS};
use crate::ir::program::{Cols, Content, LayerOp, Operand, Rows, Second, Site, Space, VectorPart};
use crate::ir::table::Holds;
use crate::model::graph::{GatedDelta, Layer, Linear, NormKind, RowView, TensorId};

/// The op of a gated delta net.
fn mix_of(net: &GatedDelta) -> Mix {
    Mix {
        key_heads: net.key_heads,
        value_heads: net.value_heads,
        key_dim: net.key_dim,
        value_dim: net.value_dim,
        kernel: net.kernel,
        eps: net.norm.eps,
        doubles: net.negative_eigenvalues,
    }
}

/// The operand, of the rows that are in a task's part.
pub(super) fn in_part(parts: u32, operand: Operand) -> Operand {
    Operand { rows: if parts > 1 { Rows::Part } else { operand.rows }, ..operand }
}

impl Builder<'_> {
    /// The gated delta net of layer `l` over `x`: what its output projection reads.
    ///
    /// # Errors
    /// What programs do not have of it, by name.
    pub(super) fn mix(
        &mut self,
        l: usize,
        layer: &Layer,
        net: &GatedDelta,
        x: BufferId,
    ) -> Result<BufferId, Infeasible> {
        if let Some(what) = self.refuses(net) {
            return Err(Infeasible::State { layer: l, what });
        }
        let op = mix_of(net);
        let projections = net.projections();
        // Parts of one matrix have one format. b and a have few rows, and some checkpoints keep their values.
        let of = |linears: &[&Linear]| format_of(self.graph, linears, self.program.precision);
        let fused = of(&projections[..4]) == of(&projections[4..]);
        let site = Site::of_layer(LayerOp::Qkv, l);
        let mut project = |name: &str, linears: &[&Linear]| {
            let cols = linears.iter().map(|linear| linear.rows).sum();
            let to = self.exchange(name, cols);
            let out = vec![self.write(Role::Out, to, Cols::blocks(UNIT_ROWS, cols))];
            let norm = layer.attn_norm.as_ref();
            self.matvec(name, Some(site), x, norm, linears, Epilogue::Store, Second::Axis(1), out);
            (to, cols)
        };
        let (to, cols) = project(&format!("qkvz.{l}"), if fused { &projections } else { &projections[..4] });
        let heads = op.value_heads;
        let (scalars, at) = match fused {
            true => (to, cols - 2 * heads),
            false => (project(&format!("ba.{l}"), &projections[4..]).0, 0),
        };

        let (keys, values) = (op.key_heads * op.key_dim, heads * op.value_dim);
        let of_key =
            |base: u32| Cols { base, stride: op.key_dim, div: op.group(), limit: base + keys, ..Cols::all(op.key_dim) };
        let of_value = |base: u32| Cols { base, limit: base + values, ..Cols::blocks(op.value_dim, values) };
        let of_heads = |base: u32| Cols { base, limit: base + heads, ..Cols::all(heads) };
        let taps = op.qkv_cols() * op.kernel;
        let conv = self.taps(&format!("mix.{l}.conv"), &net.conv, taps);
        let [a_log, dt_bias] = [("a_log", net.a_log), ("dt_bias", net.dt_bias)]
            .map(|(name, tensor)| self.vector(&format!("mix.{l}.{name}"), tensor, heads, 0.0));
        let gains = self.norm_operands(&format!("mix.{l}"), Some(&net.norm), op.value_dim);
        let sequences = self.program.table(Holds::Sequences).map(|(_, table)| table.bound);
        let (rows, of_step) = sequences.map_or((1, Rows::One), |bound| (bound, Rows::Sequences));
        let state =
            self.buffer(&format!("state.{l}"), Space::State, DType::F32, rows, heads * op.state_cols(), 1, None);
        let mixed = self.exchange(&format!("mix.{l}"), values);
        let parts = self.parts(heads);
        let mut operands = vec![
            self.read(Role::Q, to, of_key(0)),
            self.read(Role::K, to, of_key(keys)),
            self.read(Role::V, to, of_value(2 * keys)),
            self.read(Role::Gate, to, of_value(2 * keys + values)),
        ];
        operands.extend(gains);
        operands.extend([
            self.read(Role::Beta, scalars, of_heads(at)),
            self.read(Role::Decay, scalars, of_heads(at + heads)),
            constant(Role::Conv, conv, Cols::all(taps)),
            constant(Role::ALog, a_log, Cols::all(heads)),
            constant(Role::DtBias, dt_bias, Cols::all(heads)),
            in_part(
                parts,
                Operand {
                    role: Role::State,
                    access: Access::Update,
                    buffer: state,
                    rows: of_step,
                    cols: Cols::blocks(op.state_cols(), heads * op.state_cols()),
                },
            ),
            in_part(parts, self.write(Role::Out, mixed, of_value(0))),
        ]);
        let site = Some(Site::of_layer(LayerOp::Attention, l));
        self.grid(&format!("mix.{l}"), site, Op::Mix(op), heads, Second::Axis(parts), operands);
        Ok(mixed)
    }

    /// Parts of the sequences, each with a task of its own for every one of `heads` heads. A task takes its rows one after another, and an SM its
    /// tasks: the fewest rows in a row, if sequences are spread evenly. Of as few, fewer parts, which load fewer constants.
    pub(super) fn parts(&self, heads: u32) -> u32 {
        let rows_of_sm = |parts: u32| {
            let tasks = u64::from(heads.saturating_mul(parts).div_ceil(self.candidate.sms.max(1)));
            tasks * u64::from(self.program.rows.div_ceil(parts))
        };
        (1..=self.program.parts_max()).min_by_key(|&parts| rows_of_sm(parts)).unwrap_or(1)
    }

    /// Why programs do not have this net; `None`: they have it.
    fn refuses(&self, net: &GatedDelta) -> Option<&'static str> {
        let GatedDelta { key_dim, value_dim, value_heads, norm, .. } = net;
        if key_dim % 2 != 0 || value_dim % 2 != 0 || value_heads % 2 != 0 {
            return Some("heads of an odd width or number; packets need even ones");
        }
        let plain = norm.kind == NormKind::Rms && norm.weight.is_some() && norm.bias.is_none();
        (!plain).then_some("a norm of its output that is no RMS norm with gains")
    }

    /// The taps of all channels, which lie in tensors of any length, one after another.
    fn taps(&mut self, name: &str, tensors: &[TensorId], count: u32) -> BufferId {
        let part = |&tensor: &TensorId| VectorPart {
            view: Some(RowView::range(tensor, 0)),
            len: self.graph.tensor(tensor).count().min(u64::from(u32::MAX)) as u32,
        };
        let content =
            Content::Vectors { parts: tensors.iter().map(part).collect(), offset: 0.0, scale: 1.0, interleave: 1 };
        self.buffer(name, Space::Constant, DType::F32, 1, count, 1, Some(content))
    }
}
