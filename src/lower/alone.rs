//! Owns programs of one op alone: what the instruction loop checks and times.
//!
//! The op has one grid a layer, with the layer's weights, and all of them read one input: an embedding, or what the op before it
//! makes of that embedding with the weights of the first layer. So an SM does the tasks of all layers one after another, streams as
//! many bytes as a step of the model does for this op, and never waits for what other SMs make of its output: the time is
//! that of the op, without its exchange.

use super::{Branch, Builder, Sum, experts};
use crate::candidate::{Candidate, Infeasible};
use crate::dtype::Precision;
use crate::ir::BufferId;
use crate::ir::op::{Epilogue, Op, Role, UNIT_ROWS};
use crate::ir::program::{Cols, LayerOp, Program, Second, Site, Space};
use crate::model::graph::{Attention, FeedForward, Layer, Mlp, ModelGraph};

/// Prepares the graph of a model for one op alone. Unless that op is the head, the head keeps only the rows that a step needs to end:
/// 8 for each of `sms` SMs.
pub fn graph_of(op: LayerOp, graph: &mut ModelGraph, sms: u32) {
    if op != LayerOp::Head {
        graph.vocab = graph.vocab.min(UNIT_ROWS * sms);
        graph.head.rows = graph.vocab;
    }
    // Named as a model of its own, so that its trials and keys are not those of the whole model.
    graph.family = format!("{}:{}", graph.family, op.name());
}

/// Lowers one op of `graph`, which [`graph_of`] has made.
///
/// # Errors
/// As [`super::lower`].
pub fn lower_alone(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    candidate: &Candidate,
    op: LayerOp,
) -> Result<Program, Infeasible> {
    let (mut b, start) = Builder::begin(graph, name, precision, context_max, None, candidate)?;
    let (x, residual, hidden) = (start.x, start.residual, graph.hidden);
    let first = graph.layers.first();
    let input = match (op, first) {
        (LayerOp::Attention, Some(layer)) => b.qkv("feed", None, layer, attention(0, layer)?, x),
        (LayerOp::Down, Some(layer)) => {
            let mlp = dense(0, layer)?;
            b.up("feed", None, "feed", layer, (mlp, experts::epilogue_of(mlp).0), x)
        }
        (LayerOp::O, Some(layer)) => {
            let q = &attention(0, layer)?.q;
            let cols = q.rows;
            let feed = b.exchange("feed", cols);
            let out = vec![b.write(Role::Out, feed, Cols::blocks(UNIT_ROWS, cols))];
            b.matvec("feed", None, x, layer.attn_norm.as_ref(), &[q], Epilogue::Store, Second::Axis(1), out);
            feed
        }
        _ => x,
    };
    for (l, layer) in graph.layers.iter().enumerate() {
        let site = Site::of_layer(op, l);
        let sum = |b: &mut Builder<'_>, name: &str| {
            let out = (!start.everywhere).then(|| b.exchange(&format!("{name}.{l}"), hidden));
            Sum { residual, out, scale: layer.residual_scale, hidden }
        };
        match op {
            LayerOp::Qkv => {
                b.qkv(&format!("qkv.{l}"), Some(site), layer, attention(l, layer)?, input);
            }
            LayerOp::Attention => {
                b.attention(l, attention(l, layer)?, input, &start.ropes)?;
            }
            LayerOp::O => {
                let (sum, o) = (sum(&mut b, "x2"), Branch::of(input, &attention(l, layer)?.o));
                b.project_and_add(&format!("o.{l}"), site, o, layer.attn_post_norm.as_ref(), sum);
            }
            LayerOp::Up => {
                let mlp = dense(l, layer)?;
                let name = if mlp.gate.is_some() { "gate_up" } else { "up" };
                let epilogue = experts::epilogue_of(mlp).0;
                b.up(&format!("{name}.{l}"), Some(site), &format!("act.{l}"), layer, (mlp, epilogue), input);
            }
            LayerOp::Down => {
                let (sum, down) = (sum(&mut b, "x"), Branch::of(input, &dense(l, layer)?.down));
                b.project_and_add(&format!("down.{l}"), site, down, layer.mlp_post_norm.as_ref(), sum);
            }
            LayerOp::Router => return Err(Infeasible::Alone { layer: l, what: "a router" }),
            LayerOp::Head => {}
        }
    }
    Ok(b.end(x, &start))
}

/// The attention of layer `l`. Ops of other mixers are not built alone.
fn attention(l: usize, layer: &Layer) -> Result<&Attention, Infeasible> {
    layer.attention().ok_or_else(|| Infeasible::Alone { layer: l, what: layer.mixer.name() })
}

/// The MLP of layer `l`. What experts compute depends on a choice that no input of an op alone makes.
fn dense(l: usize, layer: &Layer) -> Result<&Mlp, Infeasible> {
    let what = match &layer.feed {
        FeedForward::Dense(mlp) => return Ok(mlp),
        FeedForward::Experts(_) => "experts",
        FeedForward::Scaled(_) => "an MLP with factors",
        FeedForward::None => "no MLP",
    };
    Err(Infeasible::Alone { layer: l, what })
}

/// The buffers that hold what an op makes, in the order of layers. None for the head, which makes the logits.
pub fn outputs(op: LayerOp, program: &Program) -> Vec<BufferId> {
    let mut found = vec![];
    for grid in &program.grids {
        let own = grid.site.is_some_and(|site| site.op == op);
        // Partial results are no outputs of the op.
        let whole = !matches!(&grid.op, Op::Attention(a) if a.splits > 1);
        let out = grid.operand(Role::Out).map(|o| o.buffer).filter(|_| own && whole);
        let exchanged = |id: &BufferId| program.buffers.get(id.index()).is_some_and(|b| b.space == Space::Exchange);
        if let Some(out) = out.filter(exchanged).filter(|out| !found.contains(out)) {
            found.push(out);
        }
    }
    found
}
