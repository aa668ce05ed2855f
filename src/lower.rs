//! From a model graph to a program: one function over the layer algebra, no lowering per family.

mod alone;
mod experts;
mod join;
mod mix;
mod recurrent;

pub use crate::ir::program::LayerOp;
pub use alone::{graph_of, lower_alone, outputs};

use crate::candidate::{Candidate, Infeasible, SPLITS_MAX};
use crate::dtype::{DType, Precision};
use crate::format::Format;
use crate::ir::layout::cache_pitch;
use crate::ir::op::{Access, Attention, Epilogue, MatVec, NormAttr, Op, PARTIAL_HEADER, QkNormAttr, Role, UNIT_ROWS};
use crate::ir::program::{
    Buffer, Cols, Content, Grid, Home, Operand, Paging, Part, Program, Rows, Second, Site, Space, VectorPart,
};
use crate::ir::table::{Fact, Holds, Table, TableHome};
use crate::ir::variant::{LANES, granule_pairs, sum_width_max};
use crate::ir::{BufferId, LayerId, TableId};
use crate::model::graph::{
    self, FeedForward, Layer, Linear, Mixer, Mlp, ModelGraph, Norm, NormKind, QkNorm, QkNormSpan, RopeId, RowView,
    ScaledMlp, TensorId,
};

/// Lowers `graph` to grids of tasks. The candidate decides what the program has (split attention, the number of arg-max
/// pairs); `schedule` decides where tasks run.
pub fn lower(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    candidate: &Candidate,
) -> Result<Program, Infeasible> {
    lower_steps(graph, name, precision, context_max, None, candidate)
}

/// Steps of several rows, and the pool of their cache pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Rows of a step, at most.
    pub rows: u32,
    /// Sequences that hold pages at a time.
    pub sequences: u32,
    /// Pages of the pool.
    pub pages: u32,
    /// Positions of a page.
    pub page_rows: u32,
    /// Activations travel as words, as the batch kernels need them.
    pub words: bool,
}

/// Lowers `graph` to steps of the rows of `batch` over a paged cache.
pub fn lower_batch(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    batch: &Batch,
    candidate: &Candidate,
) -> Result<Program, Infeasible> {
    lower_steps(graph, name, precision, context_max, Some(batch), candidate)
}

fn lower_steps(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    batch: Option<&Batch>,
    candidate: &Candidate,
) -> Result<Program, Infeasible> {
    if candidate.splits > SPLITS_MAX {
        let expected = format!("at most {SPLITS_MAX}");
        return Err(Infeasible::Knob { knob: "splits", value: candidate.splits, expected });
    }
    let (mut b, start) = Builder::begin(graph, name, precision, context_max, batch, candidate)?;
    let mut x = start.x;
    for (l, layer) in graph.layers.iter().enumerate() {
        x = b.layer(l, layer, x, &start)?;
    }
    Ok(b.end(x, &start))
}

struct Builder<'a> {
    graph: &'a ModelGraph,
    program: Program,
    /// Positions of a page; `None`: caches are not paged.
    page_rows: Option<u32>,
    /// Activations travel as words.
    words: bool,
    candidate: &'a Candidate,
}

/// What a step begins with.
struct Start {
    /// Arg-max pairs of a step: one for each task of the head.
    parts: u32,
    best: BufferId,
    residual: BufferId,
    logits: BufferId,
    ropes: Vec<BufferId>,
    /// The embedded token: an exchange, or the residual where every SM has all of it.
    x: BufferId,
    /// Every SM adds up a residual of its own.
    everywhere: bool,
}

/// All of a vector.
fn constant(role: Role, buffer: BufferId, cols: Cols) -> Operand {
    Operand { role, access: Access::Read, buffer, rows: Rows::One, cols }
}

/// The tables of a batch: the rows of a launch, and the pages of their sequences. A recurrent state needs one fact more.
fn tables(batch: &Batch, context_max: u32, has_state: bool) -> Vec<Table> {
    let &Batch { rows, sequences, pages, page_rows, words: _ } = batch;
    let blocks = context_max.div_ceil(page_rows.max(1));
    let table = |name: &str, holds: Holds, rows, cols, bound| Table {
        name: name.to_string(),
        home: TableHome::Host,
        holds,
        rows,
        cols,
        bound,
        facts: holds.facts().iter().copied().filter(|fact| has_state || *fact != Fact::At).collect(),
    };
    vec![
        table("row.sequence", Holds::Sequences, rows, 1, sequences),
        table("row.position", Holds::Positions, rows, 1, context_max),
        table("pages", Holds::Pages, sequences, blocks, pages),
    ]
}

fn norm_attr(norm: &Norm) -> NormAttr {
    NormAttr { kind: norm.kind, eps: norm.eps }
}

impl<'a> Builder<'a> {
    /// Declares what every program has, and decides and embeds the token.
    fn begin(
        graph: &'a ModelGraph,
        name: &str,
        precision: Precision,
        context_max: u32,
        batch: Option<&Batch>,
        candidate: &'a Candidate,
    ) -> Result<(Builder<'a>, Start), Infeasible> {
        let everywhere = candidate.sums_everywhere != 0;
        if everywhere && let Some(expected) = refuses_everywhere(graph, precision, candidate.consumer_warps) {
            let value = candidate.sums_everywhere;
            return Err(Infeasible::Knob { knob: "sums_everywhere", value, expected });
        }
        if everywhere && batch.is_some_and(|batch| batch.words) {
            let (value, expected) =
                (candidate.sums_everywhere, "0, for the sums of several rows have owners".to_string());
            return Err(Infeasible::Knob { knob: "sums_everywhere", value, expected });
        }
        let rows = batch.map_or(1, |batch| batch.rows);
        let tables = batch.map_or(vec![], |batch| tables(batch, context_max, graph.has_state()));
        let program =
            Program { name: name.to_string(), precision, context_max, rows, tables, buffers: vec![], grids: vec![] };
        let mut b = Builder {
            graph,
            program,
            page_rows: batch.map(|batch| batch.page_rows),
            words: batch.is_some_and(|batch| batch.words),
            candidate,
        };
        let hidden = graph.hidden;
        let head_units = graph.vocab.div_ceil(UNIT_ROWS);
        let parts = candidate.sms.min(head_units);

        let best = b.buffer("candidates", Space::Exchange, DType::I32, rows, 2 * parts, 2, None);
        let token = b.buffer("token", Space::Private, DType::I32, rows, 1, 1, None);
        let report = b.buffer("report", Space::Output, DType::I32, rows, 1, 1, None);
        let residual = b.buffer("residual", Space::Private, DType::F32, rows, hidden, 1, None);
        let logits = b.buffer("logits", Space::Output, DType::F32, rows, graph.vocab, 1, None);
        let table = b.buffer(
            "embed",
            Space::Constant,
            precision.weights,
            graph.vocab,
            hidden,
            1,
            Some(Content::Tensor(graph.embed)),
        );
        let of_table = graph.formats.get(&graph.embed).filter(|format| !format.is_plain());
        b.program.buffers[table.index()].coded = of_table.map(|format| format.of_table());
        let ropes = b.ropes();

        b.grid(
            "select",
            None,
            Op::Select,
            candidate.sms,
            Second::Axis(1),
            vec![b.read(Role::Best, best, Cols::all(2 * parts)), b.write(Role::Token, token, Cols::all(1))],
        );
        b.grid(
            "report",
            None,
            Op::Report,
            1,
            Second::Axis(1),
            vec![b.read(Role::Token, token, Cols::all(1)), b.write(Role::Out, report, Cols::all(1))],
        );
        let x = match &graph.joined {
            None => b.embed(token, table, residual, everywhere),
            Some(joined) => b.join(joined, token, table, residual),
        };
        Ok((b, Start { parts, best, residual, logits, ropes, x, everywhere }))
    }

    /// Embeds the token; returns the buffer that holds it.
    fn embed(&mut self, token: BufferId, table: BufferId, residual: BufferId, everywhere: bool) -> BufferId {
        let (n, cols) = self.sum_shape(everywhere);
        let mut operands = vec![
            self.read(Role::Token, token, Cols::all(1)),
            Operand { rows: Rows::Token, ..constant(Role::Table, table, cols) },
            self.write(Role::Residual, residual, cols),
        ];
        let mut x = residual;
        if !everywhere {
            x = self.exchange("x.0", self.graph.hidden);
            operands.push(self.write(Role::Out, x, cols));
        }
        self.grid("embed", None, Op::Embed { scale: self.graph.embed_scale, everywhere }, n, Second::Axis(1), operands);
        x
    }

    /// Logits and arg-max pairs of what the layers left in `x`.
    fn end(mut self, x: BufferId, start: &Start) -> Program {
        let (graph, parts) = (self.graph, start.parts);
        if graph.joined.is_some() {
            self.join_left(x);
        }
        let logits = self.write(Role::Logits, start.logits, Cols::blocks(UNIT_ROWS, graph.vocab));
        let pair = Cols { stride_j: 2, limit: 2 * parts, ..Cols::all(2) };
        let best = self.write(Role::Best, start.best, pair);
        self.matvec(
            "head",
            Some(Site::HEAD),
            x,
            Some(&graph.final_norm),
            &[&graph.head],
            Epilogue::Logits { scale: graph.logits_scale, softcap: graph.logits_softcap },
            Second::Ordinal(parts),
            vec![logits, best],
        );
        self.program
    }
}

impl Builder<'_> {
    #[allow(clippy::too_many_arguments)] // The fields of a buffer, in order.
    fn buffer(
        &mut self,
        name: &str,
        space: Space,
        dtype: DType,
        rows: u32,
        cols: u32,
        phases: u32,
        content: Option<Content>,
    ) -> BufferId {
        let id = BufferId::from(self.program.buffers.len());
        let (name, home) = (name.to_string(), Home::of(space));
        let (coded, words) = (None, false);
        self.program.buffers.push(Buffer {
            name,
            space,
            dtype,
            coded,
            rows,
            cols,
            phases,
            words,
            paging: None,
            home,
            content,
        });
        id
    }

    /// Reads columns of all rows of the step.
    fn read(&self, role: Role, buffer: BufferId, cols: Cols) -> Operand {
        let rows = if self.program.rows == 1 { Rows::One } else { Rows::All };
        Operand { role, access: Access::Read, buffer, rows, cols }
    }

    /// Writes columns of all rows of the step.
    fn write(&self, role: Role, buffer: BufferId, cols: Cols) -> Operand {
        Operand { access: Access::Write, ..self.read(role, buffer, cols) }
    }

    /// Updates columns of the residual of all rows of the step.
    fn update(&self, residual: BufferId, cols: Cols) -> Operand {
        Operand { access: Access::Update, ..self.read(Role::Residual, residual, cols) }
    }

    /// The operand, of the row that a task takes alone.
    fn own(&self, operand: Operand) -> Operand {
        let rows = if operand.rows == Rows::All { Rows::Own } else { operand.rows };
        Operand { rows, ..operand }
    }

    /// Keys or values of a layer: a row for each position, or the pages of all sequences.
    fn cache(&mut self, name: &str, cols: u32) -> BufferId {
        let (context_max, dtype) = (self.program.context_max, self.program.precision.cache);
        let pages = self.page_rows.zip(self.program.table(Holds::Pages).map(|(id, table)| (id, table.bound)));
        let rows = pages.map_or(context_max, |(page_rows, (_, pages))| pages.saturating_mul(page_rows));
        let id = self.buffer(name, Space::Cache, dtype, rows, cols, 1, None);
        self.program.buffers[id.index()].paging = pages.map(|(rows, (table, _))| Paging { table, rows });
        id
    }

    /// A table for each RoPE of the model: a row for each position.
    fn ropes(&mut self) -> Vec<BufferId> {
        let graph = self.graph;
        graph
            .ropes
            .iter()
            .enumerate()
            .map(|(i, rope)| {
                let id = RopeId::from(i);
                let cols = 2 * rope.inv_freq.len() as u32;
                let name = format!("rope.{id}");
                self.buffer(
                    &name,
                    Space::Constant,
                    DType::F32,
                    self.program.context_max,
                    cols,
                    1,
                    Some(Content::RopeTable(id)),
                )
            })
            .collect()
    }

    fn exchange(&mut self, name: &str, cols: u32) -> BufferId {
        let wire = self.program.precision.wire;
        self.exchange_of(name, wire, cols)
    }

    fn exchange_of(&mut self, name: &str, dtype: DType, cols: u32) -> BufferId {
        let phases = if self.words { 2 } else { 1 };
        let id = self.buffer(name, Space::Exchange, dtype, self.program.rows, cols, phases, None);
        self.program.buffers[id.index()].words = self.words;
        id
    }

    /// Launch extent of an op that touches the residual outside a matvec, and the columns of a launch index.
    fn sum_shape(&self, everywhere: bool) -> (u32, Cols) {
        let hidden = self.graph.hidden;
        if everywhere {
            (self.candidate.sms, Cols::all(hidden))
        } else {
            (hidden.div_ceil(UNIT_ROWS), Cols::blocks(UNIT_ROWS, hidden))
        }
    }

    fn grid(&mut self, name: &str, site: Option<Site>, op: Op, n: u32, second: Second, operands: Vec<Operand>) {
        let own = |o: &Operand| matches!(o.rows, Rows::Own | Rows::Current | Rows::History);
        let per_row = self.program.rows > 1 && operands.iter().any(own);
        self.program.grids.push(Grid { name: name.to_string(), site, op, n, second, per_row, operands });
    }

    fn vector(&mut self, name: &str, tensor: TensorId, len: u32, offset: f32) -> BufferId {
        self.vectors(name, &[tensor], len, offset)
    }

    /// `len` values of tensors of one length, one after another.
    fn vectors(&mut self, name: &str, tensors: &[TensorId], len: u32, offset: f32) -> BufferId {
        let each = len / tensors.len().max(1) as u32;
        let part = |&tensor| VectorPart { view: Some(RowView::range(tensor, 0)), len: each };
        let content = Content::Vectors { parts: tensors.iter().map(part).collect(), offset, scale: 1.0, interleave: 1 };
        self.buffer(name, Space::Constant, DType::F32, 1, len, 1, Some(content))
    }

    /// Weight and bias of a norm over `width` values.
    fn norm_operands(&mut self, name: &str, norm: Option<&Norm>, width: u32) -> Vec<Operand> {
        let mut operands = vec![];
        if let Some(norm) = norm {
            if let Some(weight) = norm.weight {
                let id = self.vector(&format!("{name}.norm_weight"), weight, width, norm.weight_offset);
                operands.push(constant(Role::NormWeight, id, Cols::all(width)));
            }
            if let Some(bias) = norm.bias {
                let id = self.vector(&format!("{name}.norm_bias"), bias, width, 0.0);
                operands.push(constant(Role::NormBias, id, Cols::all(width)));
            }
        }
        operands
    }

    /// A matvec over one linear, several stacked ones (q, k, v), or a gate and up pair.
    #[allow(clippy::too_many_arguments)] // One line of an op's operand table each.
    fn matvec(
        &mut self,
        name: &str,
        site: Option<Site>,
        x: BufferId,
        norm: Option<&Norm>,
        linears: &[&Linear],
        epilogue: Epilogue,
        second: Second,
        mut outputs: Vec<Operand>,
    ) {
        let mut operands = vec![self.read(Role::X, x, Cols::all(linears[0].cols))];
        let (mut op, held) = self.product(name, norm, linears, epilogue, None);
        op.own_input = self.program.buffers[x.index()].space == Space::Private;
        operands.extend(held);
        if op.unit_rows != UNIT_ROWS {
            let (stride, len) = (op.unit_rows, op.unit_rows);
            outputs.iter_mut().for_each(|out| out.cols = Cols { stride, len, ..out.cols });
        }
        operands.extend(outputs);
        let units = op.units();
        self.grid(name, site, Op::MatVec(op), units, second, operands);
    }

    /// A product, and what it has in memory: operands of the norm of its input, weights and biases. `linears` are the rows of one matrix, one
    /// after another, or of as many as a table chooses from (`chosen`), one matrix after another.
    fn product(
        &mut self,
        name: &str,
        norm: Option<&Norm>,
        linears: &[&Linear],
        epilogue: Epilogue,
        chosen: Option<(TableId, u32)>,
    ) -> (MatVec, Vec<Operand>) {
        let matrices = chosen.map_or(1, |(_, matrices)| matrices);
        let k = linears[0].cols;
        let all: u32 = linears.iter().map(|l| l.rows).sum();
        let norm_of_input = norm.map(norm_attr);
        let mut op = MatVec {
            rows: all / matrices,
            k,
            slots: 1,
            norm: norm_of_input,
            own_input: false,
            epilogue,
            unit_rows: UNIT_ROWS,
        };
        let format = format_of(self.graph, linears, self.program.precision);
        op.unit_rows = unit_rows(&op, format, self.program.precision, self.candidate.unit_rows);
        let units = op.units();
        let interleave = if epilogue.is_gated() { UNIT_ROWS / 2 } else { 1 };
        let mut operands = self.norm_operands(name, norm, k);
        let parts = linears.iter().map(|l| Part { view: l.weight.clone(), rows: l.rows }).collect();
        let weights = self.program.precision.weights;
        let content = Content::Rows { parts, interleave };
        let weight = self.buffer(&format!("{name}.weight"), Space::Weight, weights, all, k, 1, Some(content));
        self.program.buffers[weight.index()].coded = Some(format).filter(|format| *format != Format::plain(weights));
        operands.push(Operand {
            role: Role::Weight,
            access: Access::Stream,
            buffer: weight,
            rows: chosen.map_or(Rows::Units, |(table, _)| Rows::Lookup(table)),
            cols: Cols::blocks(1, units),
        });
        if linears.iter().any(|l| l.bias.is_some()) {
            let parts = linears.iter().map(|l| VectorPart { view: l.bias.clone(), len: l.rows }).collect();
            let content = Content::Vectors { parts, offset: 0.0, scale: 1.0, interleave };
            // Indexed as the units are: entry u n + r belongs to row r of unit u of n rows, zeros where a unit has no row.
            let len = units * op.unit_rows;
            let cols = matrices * len;
            let bias = self.buffer(&format!("{name}.bias"), Space::Constant, DType::F32, 1, cols, 1, Some(content));
            let whole = constant(Role::Bias, bias, Cols::blocks(op.unit_rows, len));
            operands.push(Operand { rows: chosen.map_or(whole.rows, |(table, _)| Rows::Lookup(table)), ..whole });
        }
        (op, operands)
    }

    /// Lowers one layer; returns the buffer that holds its output.
    fn layer(&mut self, l: usize, layer: &Layer, x: BufferId, start: &Start) -> Result<BufferId, Infeasible> {
        let (hidden, residual) = (self.graph.hidden, start.residual);
        let branches = match &layer.mixer {
            Mixer::Attention(a) => {
                let qkv = self.qkv(&format!("qkv.{l}"), Some(Site::of_layer(LayerOp::Qkv, l)), layer, a, x);
                vec![Branch::of(self.attention(l, a, qkv, &start.ropes)?, &a.o)]
            }
            Mixer::GatedDelta(net) => vec![Branch::of(self.mix(l, layer, net, x)?, &net.o)],
            Mixer::ShortConv(conv) => vec![Branch::of(self.short_conv(l, layer, conv, x)?, &conv.o)],
            Mixer::Mamba2(mamba) => vec![self.mamba(l, layer, mamba, x)?],
            Mixer::SideBySide(both) => self.side_by_side(l, layer, both, x, &start.ropes)?,
        };
        // The sum after attention is exchanged only if the MLP reads it, or the next layer, and not every SM makes it.
        let ends = matches!(layer.feed, FeedForward::None);
        let name = if ends { format!("x.{}", l + 1) } else { format!("x2.{l}") };
        let x2 = ((ends || !layer.parallel) && !start.everywhere).then(|| self.exchange(&name, hidden));
        let site = Site::of_layer(LayerOp::O, l);
        let last = branches.len().saturating_sub(1);
        for (n, branch) in branches.into_iter().enumerate() {
            // Only the last of the sums is exchanged.
            let (name, out) = if n == last { (format!("o.{l}"), x2) } else { (format!("o.{l}.{n}"), None) };
            let sum = Sum { residual, out, scale: layer.residual_scale * branch.scale, hidden };
            self.project_and_add(&name, site, branch, layer.attn_post_norm.as_ref(), sum);
        }

        match &layer.feed {
            FeedForward::None => Ok(x2.unwrap_or(residual)),
            FeedForward::Dense(mlp) => {
                let (epilogue, _) = experts::epilogue_of(mlp);
                Ok(self.mlp(l, layer, (mlp, epilogue, 1.0), x2.unwrap_or(x), start))
            }
            FeedForward::Scaled(scaled) => {
                let ScaledMlp { mlp, gate_scale, down_scale } = &**scaled;
                let epilogue = recurrent::scaled_epilogue(l, layer, mlp, *gate_scale)?;
                Ok(self.mlp(l, layer, (mlp, epilogue, *down_scale), x2.unwrap_or(x), start))
            }
            FeedForward::Experts(experts) => {
                let out = self.exchange(&format!("x.{}", l + 1), hidden);
                let sum = Sum { residual, out: Some(out), scale: layer.residual_scale, hidden };
                self.experts(l, layer, experts, x2.unwrap_or(x), &sum)?;
                Ok(out)
            }
        }
    }

    /// An MLP of a layer that reads `x`, and what multiplies its output; returns the buffer that holds the layer's output.
    fn mlp(
        &mut self,
        l: usize,
        layer: &Layer,
        (mlp, epilogue, scale): (&Mlp, Epilogue, f32),
        x: BufferId,
        start: &Start,
    ) -> BufferId {
        let (hidden, residual) = (self.graph.hidden, start.residual);
        let name = if mlp.gate.is_some() { "gate_up" } else { "up" };
        let site = Some(Site::of_layer(LayerOp::Up, l));
        let act = self.up(&format!("{name}.{l}"), site, &format!("act.{l}"), layer, (mlp, epilogue), x);
        let out = (!start.everywhere).then(|| self.exchange(&format!("x.{}", l + 1), hidden));
        let sum = Sum { residual, out, scale: layer.residual_scale * scale, hidden };
        let (site, down) = (Site::of_layer(LayerOp::Down, l), Branch::of(act, &mlp.down));
        self.project_and_add(&format!("down.{l}"), site, down, layer.mlp_post_norm.as_ref(), sum);
        out.unwrap_or(residual)
    }

    /// q, k, v and the gate of a layer, one after another in one buffer.
    fn qkv(&mut self, name: &str, site: Option<Site>, layer: &Layer, a: &graph::Attention, x: BufferId) -> BufferId {
        let linears = a.projections();
        let cols = linears.iter().map(|linear| linear.rows).sum();
        let qkv = self.exchange(name, cols);
        let out = vec![self.write(Role::Out, qkv, Cols::blocks(UNIT_ROWS, cols))];
        self.matvec(name, site, x, layer.attn_norm.as_ref(), &linears, Epilogue::Store, Second::Axis(1), out);
        qkv
    }

    /// The activation of a layer's MLP: of gate and up, or of up alone.
    fn up(
        &mut self,
        name: &str,
        site: Option<Site>,
        act: &str,
        layer: &Layer,
        (mlp, epilogue): (&Mlp, Epilogue),
        x: BufferId,
    ) -> BufferId {
        let norm = layer.mlp_norm.as_ref();
        let act = self.exchange(act, mlp.up.rows);
        let one = Second::Axis(1);
        let halves = if epilogue.is_gated() { 2 } else { 1 };
        let out = vec![self.write(Role::Out, act, Cols::blocks(UNIT_ROWS / halves, mlp.up.rows))];
        self.matvec(name, site, x, norm, &experts::up_linears(mlp), epilogue, one, out);
        act
    }

    /// `residual += scale * norm?(W norm?(x))`: one matvec, or a matvec and a sum where the branch is normalised before it is added.
    fn project_and_add(&mut self, name: &str, site: Site, branch: Branch<'_>, post: Option<&Norm>, sum: Sum) {
        let Branch { x, norm, linear, scale: _ } = branch;
        let (outputs, normed) = self.branch_end(name, post, &sum);
        let one = Second::Axis(1);
        self.matvec(name, Some(site), x, norm, &[linear], branch_epilogue(post, sum.scale), one, outputs);
        if let Some((norm, y)) = normed {
            self.norm_and_add(name, site, y, norm, &sum);
        }
    }

    /// What the last op `name` of a branch writes: it adds to the residual, or stores what `post` normalises, which is returned with it.
    fn branch_end<'n>(
        &mut self,
        name: &str,
        post: Option<&'n Norm>,
        sum: &Sum,
    ) -> (Vec<Operand>, Option<(&'n Norm, BufferId)>) {
        let Sum { residual, out, scale: _, hidden } = *sum;
        let blocks = Cols::blocks(UNIT_ROWS, hidden);
        let normed = post.map(|norm| (norm, self.exchange(&format!("{name}.y"), hidden)));
        let written = match normed {
            Some((_, y)) => vec![self.write(Role::Out, y, blocks)],
            None => {
                let added = [self.update(residual, blocks)];
                added.into_iter().chain(out.map(|out| self.write(Role::Out, out, blocks))).collect()
            }
        };
        (written, normed)
    }

    /// `residual += scale * norm(y)`
    fn norm_and_add(&mut self, name: &str, site: Site, y: BufferId, norm: &Norm, sum: &Sum) {
        let Sum { residual, out, scale, hidden } = *sum;
        // No family has a parallel block with post norms (the importer refuses it), so a sum that does not travel is
        // made by every SM.
        let everywhere = out.is_none();
        let (n, cols) = self.sum_shape(everywhere);
        let name = format!("{name}.add");
        let mut operands = vec![self.read(Role::X, y, Cols::all(hidden))];
        operands.extend(self.norm_operands(&name, Some(norm), hidden));
        operands.push(self.update(residual, cols));
        operands.extend(out.map(|out| self.write(Role::Out, out, cols)));
        let op = Op::NormAdd { norm: norm_attr(norm), width: hidden, scale, everywhere };
        self.grid(&name, Some(site), op, n, Second::Axis(1), operands);
    }

    /// Attention of a layer over what `qkv` made of the current position.
    fn attention(
        &mut self,
        l: usize,
        a: &graph::Attention,
        qkv: BufferId,
        ropes: &[BufferId],
    ) -> Result<BufferId, Infeasible> {
        let candidate = self.candidate;
        let (heads, kv_heads, dim) = (a.heads, a.kv_heads, a.head_dim);
        if dim % 2 != 0 {
            return Err(Infeasible::HeadDim { head_dim: dim });
        }
        let whole = |norm: &Option<QkNorm>| norm.as_ref().is_some_and(|norm| norm.span == QkNormSpan::Projection);
        if a.norm_after_rope && (whole(&a.q_norm) || whole(&a.k_norm)) {
            return Err(Infeasible::NormAfterRope);
        }
        let group = heads / kv_heads;
        let heads_per_task = heads_of_task(group, candidate)?;
        let q_cols = heads * dim;

        let pitch = cache_pitch(dim, self.program.precision.cache);
        let k_cache = self.cache(&format!("k.{l}"), kv_heads * pitch);
        let v_cache = self.cache(&format!("v.{l}"), kv_heads * pitch);
        let attn = self.exchange(&format!("attn.{l}"), q_cols);
        let mut constants = vec![];
        for (role, norm, heads) in [(Role::QNormWeight, &a.q_norm, heads), (Role::KNormWeight, &a.k_norm, kv_heads)] {
            if let Some(QkNorm { weights, weight_offset, span, .. }) = norm {
                let len = span.gains(heads, dim);
                let id = self.vectors(&format!("attn.{l}.{}", role.name()), weights, len, *weight_offset);
                constants.push(constant(role, id, Cols::all(len)));
            }
        }
        if let Some(rope) = a.rope {
            let table = ropes[rope.index()];
            let cols = self.program.buffers[table.index()].cols;
            constants.push(Operand { rows: Rows::Current, ..constant(Role::Rope, table, Cols::all(cols)) });
        }
        if self.program.precision.cache == DType::E4m3 {
            let content = Some(Content::CacheScales(LayerId::from(l)));
            let scales = self.buffer(
                &format!("attn.{l}.cache_scales"),
                Space::Constant,
                DType::F32,
                1,
                2 * kv_heads,
                1,
                content,
            );
            constants.push(constant(Role::CacheScales, scales, Cols::all(2)));
        }
        if let Some(sinks) = a.sinks {
            let sinks = self.vector(&format!("attn.{l}.sinks"), sinks, heads, 0.0);
            constants.push(constant(Role::Sinks, sinks, Cols::all(heads)));
        }
        let base = Attention { heads_per_task, ..attention_of(self.graph, a) };
        let site = Site::of_layer(LayerOp::Attention, l);
        let buffers = AttentionBuffers { qkv, k_cache, v_cache };
        self.attention_grid(&format!("attn.{l}"), site, base.clone(), &buffers, &constants, attn);
        if candidate.splits > 1 && candidate.split_from < self.program.context_max {
            let splits = candidate.splits;
            // All query heads of a KV head where they fit one tensor-core operand: the history is read once.
            let heads_per_task = heads_per_task_most(group);
            let op = Attention { heads_per_task, splits, ..base.clone() };
            let record = op.heads_per_task * (dim + PARTIAL_HEADER);
            let cols = op.head_groups() * splits * record;
            let partial = self.exchange_of(&format!("partial.{l}"), DType::F32, cols);
            self.attention_grid(&format!("attn_split.{l}"), site, op, &buffers, &constants, partial);
            let gate = a.gate.as_ref().map(|_| self.own(self.read(Role::Gate, qkv, gate_cols(&base, dim))));
            let merge = Op::AttentionMerge { head_dim: dim, splits, heads_per_task, gate: gate.is_some() };
            let group_cols = Cols { div: heads_per_task, ..Cols::blocks(splits * record, cols) };
            let records = self.own(self.read(Role::Partial, partial, group_cols));
            let merged = self.own(self.write(Role::Out, attn, Cols::blocks(dim, q_cols)));
            let operands = [records].into_iter().chain(gate).chain([merged]).collect();
            let one = Second::Axis(1);
            self.grid(&format!("attn_merge.{l}"), Some(site), merge, heads, one, operands);
        }
        Ok(attn)
    }

    fn attention_grid(
        &mut self,
        name: &str,
        site: Site,
        op: Attention,
        buffers: &AttentionBuffers,
        constants: &[Operand],
        out: BufferId,
    ) {
        let (dim, splits) = (op.head_dim, op.splits);
        let (q_cols, kv_cols) = (op.heads * dim, op.kv_heads() * dim);
        let per_kv = op.group / op.heads_per_task;
        let q_len = op.heads_per_task * dim;
        // Only the share that holds the current position needs its key and value.
        let last = Some(splits - 1);
        let head_kv = |base: u32| Cols {
            base,
            stride: dim,
            div: per_kv,
            len: dim,
            limit: base + kv_cols,
            only_j: last,
            ..Cols::all(dim)
        };
        let whole = |base: u32, len: u32| Cols { base, limit: base + len, ..Cols::all(len) };
        let q = match op.q_norm {
            Some(QkNormAttr { span: QkNormSpan::Projection, .. }) => whole(0, q_cols),
            _ => Cols::blocks(q_len, q_cols),
        };
        let k = match op.k_norm {
            Some(QkNormAttr { span: QkNormSpan::Projection, .. }) => Cols { only_j: last, ..whole(q_cols, kv_cols) },
            _ => head_kv(q_cols),
        };
        let pitch = cache_pitch(dim, self.program.precision.cache);
        let history = Cols { only_j: None, stride: pitch, limit: op.kv_heads() * pitch, ..head_kv(0) };
        let append = Cols { first: true, only_j: last, ..history };
        let mut operands = vec![
            self.own(self.read(Role::Q, buffers.qkv, q)),
            // Keys of all rows: a task also sees those of its sequence's earlier rows.
            self.read(Role::K, buffers.qkv, k),
            self.read(Role::V, buffers.qkv, head_kv(q_cols + kv_cols)),
        ];
        if op.gate && splits == 1 {
            operands.push(self.own(self.read(Role::Gate, buffers.qkv, gate_cols(&op, q_len))));
        }
        // Unlike the other constants, scales are read for one KV head alone, and sinks for the heads of a task, with the current position.
        let of_head = Cols { stride: 2, div: per_kv, limit: 2 * op.kv_heads(), ..Cols::all(2) };
        let of_task = Cols { only_j: last, ..Cols::blocks(op.heads_per_task, op.heads) };
        operands.extend(constants.iter().cloned().map(|operand| match operand.role {
            Role::CacheScales => Operand { cols: of_head, ..operand },
            Role::Sinks => Operand { cols: of_task, ..operand },
            _ => operand,
        }));
        for (role, buffer) in [(Role::HistoryK, buffers.k_cache), (Role::HistoryV, buffers.v_cache)] {
            operands.push(Operand { role, access: Access::Stream, buffer, rows: Rows::History, cols: history });
        }
        for (role, buffer) in [(Role::AppendK, buffers.k_cache), (Role::AppendV, buffers.v_cache)] {
            operands.push(Operand { role, access: Access::Write, buffer, rows: Rows::Current, cols: append });
        }
        let cols = if splits == 1 {
            Cols::blocks(q_len, q_cols)
        } else {
            let record = op.heads_per_task * (dim + PARTIAL_HEADER);
            let limit = op.head_groups() * splits * record;
            Cols { stride: splits * record, stride_j: record, limit, ..Cols::all(record) }
        };
        operands.push(self.own(self.write(Role::Out, out, cols)));
        let n = op.head_groups();
        self.grid(name, Some(site), Op::Attention(op), n, Second::Axis(splits), operands);
    }
}

/// The gate's columns of one head, or of several, after q, k and v.
fn gate_cols(a: &Attention, len: u32) -> Cols {
    let (q_cols, base) = (a.heads * a.head_dim, (a.heads + 2 * a.kv_heads()) * a.head_dim);
    Cols { base, limit: base + q_cols, ..Cols::blocks(len, q_cols) }
}

/// Attention of a layer, unsplit, with as many query heads a task as one can take.
pub fn attention_of(graph: &ModelGraph, a: &graph::Attention) -> Attention {
    let rope = a.rope.map(|rope| &graph.ropes[rope.index()]);
    let qk_norm = |norm: &Option<QkNorm>| {
        let attr = |n: &QkNorm| QkNormAttr { norm: NormAttr { kind: n.kind, eps: n.eps }, span: n.span };
        norm.as_ref().map(attr)
    };
    let group = a.heads / a.kv_heads;
    Attention {
        heads_per_task: heads_per_task_most(group),
        group,
        heads: a.heads,
        head_dim: a.head_dim,
        scale: a.scale,
        softcap: a.softcap,
        window: a.window,
        rotary: rope.map_or(0, |rope| 2 * rope.inv_freq.len() as u32),
        interleaved: rope.is_some_and(|rope| rope.interleaved),
        q_norm: qk_norm(&a.q_norm),
        k_norm: qk_norm(&a.k_norm),
        splits: 1,
        sinks: a.sinks.is_some(),
        gate: a.gate.is_some(),
        query_scale: a.query_scale,
        norm_after_rope: a.norm_after_rope,
    }
}

/// The format of a matrix over `linears`: the one that all of them are stored in. Parts that differ are stored as fp32, which holds
/// the values of every format.
pub fn format_of(graph: &ModelGraph, linears: &[&Linear], precision: Precision) -> Format {
    let of = |linear: &&Linear| graph.formats.get(&linear.weight.tensor).copied();
    let first = linears.first().and_then(of);
    if linears.iter().any(|linear| of(linear) != first) {
        return Format::plain(DType::F32);
    }
    first.unwrap_or(Format::plain(precision.weights))
}

/// SMs that units are sized for, whatever a candidate or a GPU has: the pack is the same for all of them.
const BALANCED_SMS: u32 = 132;

/// A product with the first of some matrices that is stored as it is.
fn stored(linears: &[&Linear]) -> MatVec {
    let (rows, k) = linears.first().map_or((0, 0), |linear| (linear.rows, linear.cols));
    MatVec { rows, k, slots: 1, norm: None, own_input: false, epilogue: Epilogue::Store, unit_rows: UNIT_ROWS }
}

/// The epilogue of the product that ends a branch.
fn branch_epilogue(post: Option<&Norm>, scale: f32) -> Epilogue {
    if post.is_some() { Epilogue::Store } else { Epilogue::Residual { scale } }
}

/// Rows of the units of a matvec: the largest number, from `least` on, that makes the longest share among [`BALANCED_SMS`] shortest.
fn unit_rows(op: &MatVec, format: Format, precision: Precision, least: u32) -> u32 {
    let longest = |rows: u32| op.rows.div_ceil(rows).div_ceil(BALANCED_SMS).saturating_mul(rows);
    let lanes = |rows: u32| granule_pairs(UNIT_ROWS / rows, format, precision) <= LANES;
    let may = |rows: &u32| *rows >= least && op.takes_unit_rows(*rows, format) && lanes(*rows);
    [UNIT_ROWS, 4, 2].into_iter().filter(may).min_by_key(|&rows| longest(rows)).unwrap_or(UNIT_ROWS)
}

/// Rows of the smallest units that any matvec of a model takes, if it may have as few as `least`.
pub fn finest_unit_rows(graph: &ModelGraph, precision: Precision, least: u32) -> u32 {
    fn shared(l: &Layer) -> Option<&Mlp> {
        Some(&l.feed.experts()?.shared.as_ref()?.mlp)
    }
    let of_layer = |l: &Layer| {
        let stored = |linears: &[&Linear], epilogue: Epilogue| {
            let op = MatVec { rows: linears.iter().map(|l| l.rows).sum(), epilogue, ..stored(linears) };
            (op, format_of(graph, linears, precision))
        };
        let attn = l.attention();
        let stores = l.mlp_post_norm.is_some() || l.feed.experts().is_some();
        let of_mlp = |mlp: &Mlp| {
            let up = mlp.gate.is_none().then(|| stored(&[&mlp.up], Epilogue::Act(mlp.act)));
            up.into_iter().chain(stores.then(|| stored(&[&mlp.down], Epilogue::Store)))
        };
        let mut all: Vec<_> = attn.map(|a| stored(&a.projections(), Epilogue::Store)).into_iter().collect();
        all.extend(attn.filter(|_| l.attn_post_norm.is_some()).map(|a| stored(&[&a.o], Epilogue::Store)));
        // Experts are of one shape.
        all.extend(l.feed.mlps().take(1).chain(shared(l)).flat_map(of_mlp));
        let choosing: Vec<&Linear> = l.feed.choosing().collect();
        all.extend((!choosing.is_empty()).then(|| stored(&choosing, Epilogue::Scores)));
        all
    };
    let all = graph.layers.iter().flat_map(of_layer);
    all.map(|(op, format)| unit_rows(&op, format, precision, least)).min().unwrap_or(UNIT_ROWS)
}

/// Why sums cannot be made by every SM; `None`: they can. All branches must be normalised before they are added: for the norm, every SM
/// reads a whole branch anyway. Kernels take RMS norms there, and hold a whole branch in registers.
pub fn refuses_everywhere(graph: &ModelGraph, precision: Precision, consumer_warps: u32) -> Option<String> {
    let rms = |norm: &Norm| norm.kind == NormKind::Rms && norm.weight.is_some() && norm.bias.is_none();
    let fits = |l: &Layer| {
        let posts = [&l.attn_post_norm, &l.mlp_post_norm].into_iter().all(|norm| norm.as_ref().is_some_and(rms));
        posts && !l.parallel && l.feed.dense().is_some() && [&l.attn_norm, &l.mlp_norm].into_iter().flatten().all(rms)
    };
    if graph.joined.is_some() || graph.layers.is_empty() || !graph.layers.iter().all(fits) || !rms(&graph.final_norm) {
        return Some("0, where not every branch has an RMS norm before it is added".to_string());
    }
    let most = sum_width_max(precision, consumer_warps);
    (graph.hidden > most).then(|| format!("0, for a block holds a branch of at most {most} values in registers"))
}

/// Query heads are rows of one 8-row half of a tensor-core operand.
pub const HEADS_PER_TASK_MAX: u32 = 8;

/// The most query heads of one KV head that one task can take.
pub fn heads_per_task_most(group: u32) -> u32 {
    (1..=HEADS_PER_TASK_MAX.min(group)).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

/// The query heads of one attention task, of the `group` that share a KV head.
///
/// # Errors
/// A number of heads that does not divide the group, or is more than a task can take.
pub fn heads_of_task(group: u32, candidate: &Candidate) -> Result<u32, Infeasible> {
    let heads = candidate.heads_per_task.min(group);
    if heads == 0 || !group.is_multiple_of(heads) || heads > HEADS_PER_TASK_MAX {
        let expected = format!("a divisor, at most {HEADS_PER_TASK_MAX}, of the {group} query heads of a KV head");
        return Err(Infeasible::Knob { knob: "heads_per_task", value: candidate.heads_per_task, expected });
    }
    Ok(heads)
}

/// What a layer adds to its residual: `linear(norm?(x))`.
struct Branch<'a> {
    x: BufferId,
    norm: Option<&'a Norm>,
    linear: &'a Linear,
    /// Multiplies it.
    scale: f32,
}

impl<'a> Branch<'a> {
    fn of(x: BufferId, linear: &'a Linear) -> Branch<'a> {
        Branch { x, norm: None, linear, scale: 1.0 }
    }
}

struct Sum {
    residual: BufferId,
    out: Option<BufferId>,
    scale: f32,
    hidden: u32,
}

struct AttentionBuffers {
    qkv: BufferId,
    k_cache: BufferId,
    v_cache: BufferId,
}
