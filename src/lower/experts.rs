//! Layers with experts: scores, the choice, the products of the chosen experts, and their sum.

use super::{Builder, Sum, branch_epilogue, constant, format_of, stored, unit_rows};
use crate::candidate::Infeasible;
use crate::dtype::DType;
use crate::ir::layout::SPAN_BYTES;
use crate::ir::op::{Combine, Epilogue, Op, Role, Route, SLOTS_MAX, UNIT_ROWS};
use crate::ir::program::{Cols, LayerOp, Operand, Second, Site, Space};
use crate::ir::table::{Holds, Table, TableHome};
use crate::ir::{BufferId, TableId};
use crate::model::graph::{Experts, Layer, Linear, Mlp, Norm, Router, SharedExpert};

/// Most columns of its input: those of all slots are in shared memory at once. With 8192 no kernel of OLMoE-1B-7B would fit a T4.
const INPUTS_MAX: u32 = 6144;

/// What the step chose in a layer.
struct Choice {
    table: TableId,
    /// Chosen experts by slot.
    choices: BufferId,
    /// Their weights.
    shares: BufferId,
    slots: u32,
}

/// One matrix of each expert, side by side, and what the chosen ones are multiplied with.
struct OfExperts<'a> {
    /// By expert: the linears whose rows are one matrix.
    linears: Vec<Vec<&'a Linear>>,
    norm: Option<&'a Norm>,
    epilogue: Epilogue,
    x: BufferId,
    /// Columns of `x` that slot `j` reads.
    input: Cols,
    out: BufferId,
    /// Columns of `out` of a slot.
    columns: u32,
    /// Whether the result is multiplied with the share of its slot.
    weighed: bool,
}

impl Builder<'_> {
    /// What follows attention in layer `l` with experts: adds their sum as `sum` says.
    pub(super) fn experts(
        &mut self,
        l: usize,
        layer: &Layer,
        experts: &Experts,
        x: BufferId,
        sum: &Sum,
    ) -> Result<(), Infeasible> {
        let Experts { router: _, experts: of, shared } = experts;
        let Some(first) = of.first() else {
            return Err(Infeasible::Experts { layer: l, what: "no experts".to_string() });
        };
        let norm = layer.mlp_norm.as_ref();
        let hidden = sum.hidden;
        let (choice, scores) = self.choice(l, experts, norm, x);
        let slots = choice.slots;
        let width = first.up.rows;
        let (epilogue, halves) = epilogue_of(first);
        let refused = |what: String| Infeasible::Experts { layer: l, what };
        if !hidden.is_multiple_of(UNIT_ROWS) {
            return Err(refused(format!("experts beside {hidden} columns, expected a multiple of {UNIT_ROWS}")));
        }
        // A slot begins with whole packets, or with whole spans of words.
        let pitch = width.next_multiple_of(UNIT_ROWS / halves);
        let wire = self.program.precision.wire;
        let (span, packet) = (SPAN_BYTES / wire.bytes() as u32, DType::F32.bytes() as u32 / wire.bytes() as u32);
        if !width.is_multiple_of(packet) {
            return Err(refused(format!(
                "experts of {width} columns: a packet of activations has {packet} of them, so in {wire} they need a multiple"
            )));
        }
        if halves == 1 && pitch != width {
            return Err(refused(format!(
                "experts of {width} columns without a gate, expected a multiple of {UNIT_ROWS}"
            )));
        }
        if self.words && !width.is_multiple_of(span) {
            let what =
                format!("experts of {width} columns: a batch kernel needs a multiple of {span}, so steps have one row");
            return Err(refused(what));
        }
        let act = self.exchange(&format!("act.{l}"), slots * pitch);
        let downs: Vec<&Linear> = of.iter().map(|mlp| &mlp.down).collect();
        let at_once = shared.is_none() && pitch == width && self.sums_slots(&downs, slots);
        let up = OfExperts {
            linears: of.iter().map(up_linears).collect(),
            norm,
            epilogue,
            x,
            input: Cols::all(hidden),
            out: act,
            columns: pitch,
            weighed: at_once,
        };
        let site = Site::of_layer(LayerOp::Up, l);
        let name = if halves == 2 { "gate_up" } else { "up" };
        self.matvec_of_experts(&format!("{name}.{l}"), site, up, &choice);

        if at_once {
            self.down_of_slots(l, layer, &downs, act, &choice, sum);
            return Ok(());
        }
        let inputs = slots + u32::from(shared.is_some());
        let y = self.exchange(&format!("down.{l}.y"), inputs * hidden);
        let down = OfExperts {
            linears: downs.iter().map(|down| vec![*down]).collect(),
            norm: None,
            epilogue: Epilogue::Store,
            x: act,
            input: Cols { stride_j: pitch, limit: slots * pitch, ..Cols::all(width) },
            out: y,
            columns: hidden,
            weighed: false,
        };
        let site = Site::of_layer(LayerOp::Down, l);
        self.matvec_of_experts(&format!("down.{l}"), site, down, &choice);

        let mut gate = None;
        if let Some(SharedExpert { mlp, gate: of_shared, scale: _ }) = shared {
            let (epilogue, halves) = epilogue_of(mlp);
            let rows = UNIT_ROWS / halves;
            let act = self.exchange(&format!("shared_act.{l}"), mlp.up.rows);
            let out = vec![self.write(Role::Out, act, Cols::blocks(rows, mlp.up.rows))];
            let (one, site) = (Second::Axis(1), Some(Site::of_layer(LayerOp::Up, l)));
            self.matvec(&format!("shared_up.{l}"), site, x, norm, &up_linears(mlp), epilogue, one, out);
            let cols = Cols { base: slots * hidden, ..Cols::blocks(UNIT_ROWS, inputs * hidden) };
            let out = vec![self.write(Role::Out, y, cols)];
            let (one, site) = (Second::Axis(1), Some(Site::of_layer(LayerOp::Down, l)));
            self.matvec(&format!("shared_down.{l}"), site, act, None, &[&mlp.down], Epilogue::Store, one, out);
            let column = of.len() as u32;
            let cols = Cols { base: column, limit: column + 1, ..Cols::all(1) };
            gate = of_shared.as_ref().map(|_| self.read(Role::Gate, scores, cols));
        }
        self.combine(l, layer, &choice, shared.as_ref().map(|shared| shared.scale), gate, y, sum);
        Ok(())
    }

    /// Scores of all experts, and the choice. The gate of a shared expert is one more score.
    fn choice(&mut self, l: usize, experts: &Experts, norm: Option<&Norm>, x: BufferId) -> (Choice, BufferId) {
        // Destructured, so that what a router has in addition is not left out.
        let &Router { ref linear, top_k: slots, score, correction, groups, normalise, scale } = &experts.router;
        let count = experts.experts.len() as u32;
        let gate = experts.shared.as_ref().and_then(|shared| shared.gate.as_ref());
        let linears: Vec<&Linear> = [linear].into_iter().chain(gate).collect();
        let cols = linears.iter().map(|linear| linear.rows).sum();
        let site = Site::of_layer(LayerOp::Router, l);
        let scores = self.packets(&format!("scores.{l}"), DType::F32, cols);
        let out = vec![self.write(Role::Out, scores, Cols::blocks(UNIT_ROWS, cols))];
        let one = Second::Axis(1);
        self.matvec(&format!("router.{l}"), Some(site), x, norm, &linears, Epilogue::Scores, one, out);

        let choices = self.packets(&format!("choices.{l}"), DType::I32, slots);
        let shares = self.packets(&format!("shares.{l}"), DType::F32, slots);
        let table = TableId::from(self.program.tables.len());
        self.program.tables.push(Table {
            name: format!("expert.{l}"),
            home: TableHome::Device(choices),
            holds: Holds::Choices,
            rows: self.program.rows,
            cols: slots,
            bound: count,
            facts: vec![],
        });
        let mut operands = vec![self.own(self.read(Role::X, scores, Cols::all(count)))];
        if let Some(correction) = correction {
            let id = self.vector(&format!("router.{l}.correction"), correction, count, 0.0);
            operands.push(constant(Role::Bias, id, Cols::all(count)));
        }
        operands.push(self.own(self.write(Role::Shares, shares, Cols::all(slots))));
        operands.push(self.own(self.write(Role::Out, choices, Cols::all(slots))));
        let route = Route { experts: count, top_k: slots, score, groups, normalise, scale };
        self.grid(&format!("route.{l}"), Some(site), Op::Route(route), 1, Second::Axis(1), operands);
        (Choice { table, choices, shares, slots }, scores)
    }

    /// An exchange of packets, in a batch kernel too: a loader polls a choice, and a task takes one row of it.
    fn packets(&mut self, name: &str, dtype: DType, cols: u32) -> BufferId {
        self.buffer(name, Space::Exchange, dtype, self.program.rows, cols, 1, None)
    }

    /// Whether one product adds up what all slots make of their inputs, which spares the hop to a sum. Steps of several rows have no such product. Biases and
    /// scales of rows would have to be added slot by slot. Units have the rows that they have in kernels without this product: the pack is the same.
    fn sums_slots(&self, downs: &[&Linear], slots: u32) -> bool {
        let Some(down) = downs.first() else { return false };
        let format = format_of(self.graph, downs, self.program.precision);
        let op = stored(downs);
        let unit = unit_rows(&op, format, self.program.precision, self.candidate.unit_rows);
        // On a CPU, whose SMs are one warp, a hop costs nothing, and a row has the bits that it has in a step of several.
        self.program.rows == 1
            && self.candidate.consumer_warps > 1
            && (2..=SLOTS_MAX).contains(&slots)
            && slots * op.k <= INPUTS_MAX
            && down.cols.is_multiple_of(format.granule_k())
            && unit == UNIT_ROWS
            && !format.row_scales
            && downs.iter().all(|down| down.bias.is_none())
    }

    /// The products of all slots with the matrices of their experts, added up, for inputs that their shares have multiplied.
    fn down_of_slots(&mut self, l: usize, layer: &Layer, downs: &[&Linear], act: BufferId, choice: &Choice, sum: &Sum) {
        let Choice { table, choices, slots, .. } = *choice;
        let (name, site) = (format!("down.{l}"), Site::of_layer(LayerOp::Down, l));
        let post = layer.mlp_post_norm.as_ref();
        let epilogue = branch_epilogue(post, sum.scale);
        let (mut op, held) = self.product(&name, None, downs, epilogue, Some((table, downs.len() as u32)));
        op.slots = slots;
        let mut operands = vec![self.read(Role::X, act, Cols::all(op.inputs()))];
        operands.extend(held);
        operands.push(self.read(Role::Choices, choices, Cols::all(slots)));
        let (written, normed) = self.branch_end(&name, post, sum);
        operands.extend(written);
        let units = op.units();
        self.grid(&name, Some(site), Op::MatVec(op), units, Second::Axis(1), operands);
        if let Some((norm, y)) = normed {
            self.norm_and_add(&name, site, y, norm, sum);
        }
    }

    /// A product for each slot, with the matrix of the expert that it chose, or for each expert, with the rows that chose it.
    fn matvec_of_experts(&mut self, name: &str, site: Site, of: OfExperts<'_>, choice: &Choice) {
        let Choice { table, choices, shares, slots } = *choice;
        let experts = of.linears.len() as u32;
        let all: Vec<&Linear> = of.linears.iter().flatten().copied().collect();
        // Steps of several rows read an expert once for all rows that chose it; a task of one row is about one slot.
        let is_dealt = self.program.rows > 1;
        let each = |cols: Cols| if is_dealt { Cols::all(cols.limit) } else { cols };
        let mut operands = vec![self.read(Role::X, of.x, each(of.input))];
        let (op, held) = self.product(name, of.norm, &all, of.epilogue, Some((table, experts)));
        operands.extend(held);
        let entry = each(Cols { stride_j: 1, limit: slots, ..Cols::all(1) });
        operands.push(self.read(Role::Choices, choices, entry));
        operands.extend(of.weighed.then(|| self.read(Role::Shares, shares, entry)));
        let len = if op.epilogue.is_gated() { UNIT_ROWS / 2 } else { op.unit_rows };
        let limit = self.program.buffers[of.out.index()].cols.min(slots * of.columns);
        let cols = Cols { stride: len, stride_j: of.columns, limit, ..Cols::all(len) };
        operands.push(self.write(Role::Out, of.out, each(cols)));
        let units = op.units();
        let second = if is_dealt { Second::Dealt(self.candidate.sms) } else { Second::Axis(slots) };
        self.grid(name, Some(site), Op::MatVec(op), units, second, operands);
    }

    /// The sum over slots, added to the residual, or normalised first.
    #[allow(clippy::too_many_arguments)] // One operand each.
    fn combine(
        &mut self,
        l: usize,
        layer: &Layer,
        choice: &Choice,
        shared: Option<f32>,
        gate: Option<Operand>,
        y: BufferId,
        sum: &Sum,
    ) {
        let Sum { scale, hidden, .. } = *sum;
        let post = layer.mlp_post_norm.as_ref();
        let op = Combine {
            width: hidden,
            slots: choice.slots,
            shared,
            scale: if post.is_some() { 1.0 } else { scale },
            adds: post.is_none(),
        };
        let of_slot = |slot: u32| Cols { base: slot * hidden, ..Cols::blocks(UNIT_ROWS, (slot + 1) * hidden) };
        let mut operands: Vec<Operand> = (0..op.inputs()).map(|slot| self.read(Role::X, y, of_slot(slot))).collect();
        operands.push(self.read(Role::Shares, choice.shares, Cols::all(choice.slots)));
        operands.extend(gate);
        let site = Site::of_layer(LayerOp::Down, l);
        let (name, n, one) = (format!("combine.{l}"), hidden.div_ceil(UNIT_ROWS), Second::Axis(1));
        let (written, normed) = self.branch_end(&name, post, sum);
        operands.extend(written);
        self.grid(&name, Some(site), Op::Combine(op), n, one, operands);
        if let Some((norm, y)) = normed {
            self.norm_and_add(&name, site, y, norm, sum);
        }
    }
}

/// The matrices that an MLP multiplies its input with.
pub(super) fn up_linears(mlp: &Mlp) -> Vec<&Linear> {
    mlp.gate.iter().chain([&mlp.up]).collect()
}

/// How an MLP activates, and how many matrices its units hold rows of.
pub(super) fn epilogue_of(mlp: &Mlp) -> (Epilogue, u32) {
    match (&mlp.gate, mlp.swiglu) {
        (Some(_), Some(swiglu)) => (Epilogue::Clamped(swiglu), 2),
        (Some(_), None) => (Epilogue::Gated(mlp.act), 2),
        (None, _) => (Epilogue::Act(mlp.act), 1),
    }
}
