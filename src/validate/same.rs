//! The judgement *same*: a program computes its model.
//!
//! The rules of [`super`] prove that a schedule computes its program, in every order. They do not know the model: a layer that reads the norm
//! weight of another layer breaks none of them. This file computes what each value of a program is, as a formula over the tensors of the
//! checkpoint, and compares that with the formulas of the model graph. Wave plans are compared with the program of their schedule
//! ([`crate::waves::prove`]), so they compute the model, too.
//!
//! A formula is a term, and equal terms have one number. So a comparison of two programs of any depth takes time in proportion to their ops.
//! Rules of [`super`] have proven before that the columns of an operand are those that its op asks for, apart from where they begin. What
//! is compared here is therefore where they begin, what is there, and every attribute of an op.
//!
//! *Not compared*: the order of sums, and the rounding of values on their way. `check` compares numbers. Which bytes a tensor or a RoPE
//! table has is known to `pack`.

use crate::dtype::DType;
use crate::error::{Fault, Tier};
use crate::format::{Format, ScaleCode};
use crate::ir::op::{
    Attention, Convolve, Epilogue, GroupNorm, MatVec, Mix, NormAttr, Op, OpKey, QkNormAttr, Role, Route, Scan,
};
use crate::ir::program::{Buffer, Content, Grid, Operand, Part, Program, Rows};
use crate::ir::table::{Table, TableHome};
use crate::ir::{BufferId, GridId, LayerId};
use crate::model::graph::{
    self, Act, ClampedSwiglu, Experts, FeedForward, GatedDelta, GatedNorm, Joined, Linear, Mamba2, Mixer, Mlp,
    ModelGraph, NormKind, QkNorm, QkNormSpan, QueryScale, RopeId, Router, RowView, ScaledMlp, SharedExpert, ShortConv,
    SideBySide, TensorId,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A program that does not compute its model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{program}` does not compute its model: {place}: {what}")]
pub struct NotSame {
    pub program: String,
    /// The grid where it differs first, or what the program lacks.
    pub place: String,
    /// Expected before found.
    pub what: String,
}

/// On the way from our own lowering to a kernel, this is our bug.
impl From<NotSame> for Fault {
    fn from(error: NotSame) -> Fault {
        let remedy = Some("report this with the schedule's text".to_string());
        Fault { tier: Tier::Internal, message: error.to_string(), remedy }
    }
}

/// Proves that a program computes `graph`: the logits that decide a token, and the keys and values of each layer.
///
/// # Errors
/// The first grid that computes what the model does not have, or what the program leaves out.
pub fn same(graph: &ModelGraph, program: &Program) -> Result<(), NotSame> {
    let mut terms = Terms::default();
    let model = Model::of(graph, program, &mut terms).map_err(|layer| NotSame {
        program: program.name.clone(),
        place: format!("layer {layer}"),
        what: "no program has such a mixer, or what follows it".to_string(),
    })?;
    let mut reader = Reader {
        graph,
        program,
        terms: &mut terms,
        model: &model,
        holds: BTreeMap::new(),
        caches: vec![],
        left: None,
        head_input: None,
    };
    reader.program().map_err(|(place, what)| NotSame { program: program.name.clone(), place, what })
}

/// The number of a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct TermId(u32);

/// Rows of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Slice {
    tensor: TensorId,
    first: u32,
    /// `None`: consecutive rows.
    blocks: Option<(u32, u32)>,
    rows: u32,
}

impl Slice {
    fn of(view: &RowView, rows: u32) -> Slice {
        let RowView { tensor, first, block, stride } = *view;
        Slice { tensor, first, blocks: (block != stride && rows > block).then_some((block, stride)), rows }
    }

    fn whole(tensor: TensorId, rows: u32) -> Slice {
        Slice::of(&RowView::range(tensor, 0), rows)
    }
}

/// The gains of a norm, or its biases: slices one after another, each value plus an offset, times a scale.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Vector {
    parts: Vec<Option<Slice>>,
    offset: u32,
    scale: u32,
}

impl Vector {
    fn of(content: &Content) -> Option<Vector> {
        let Content::Vectors { parts, offset, scale, interleave: 1 } = content else { return None };
        let part = |part: &crate::ir::program::VectorPart| part.view.as_ref().map(|view| Slice::of(view, part.len));
        Some(Vector { parts: parts.iter().map(part).collect(), offset: offset.to_bits(), scale: scale.to_bits() })
    }

    fn whole(tensors: &[TensorId], len: u32, offset: f32) -> Vector {
        let each = len / tensors.len().max(1) as u32;
        let parts = tensors.iter().map(|t| Some(Slice::whole(*t, each))).collect();
        Vector { parts, offset: offset.to_bits(), scale: 1f32.to_bits() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct NormTerm {
    kind: NormKind,
    eps: u32,
    weight: Option<Vector>,
    bias: Option<Vector>,
}

/// The norm of q or k, before RoPE or after it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct QkNormTerm {
    kind: NormKind,
    eps: u32,
    span: QkNormSpan,
    weight: Option<Vector>,
    after_rope: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RopeTerm {
    table: RopeId,
    rotary: u32,
    interleaved: bool,
}

/// How scores become weights of values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Scores {
    heads: u32,
    group: u32,
    head_dim: u32,
    scale: u32,
    softcap: Option<u32>,
    window: Option<u32>,
    /// Of queries: beta, and the positions without an effect.
    query_scale: Option<(u32, u32)>,
    /// The sink of each head.
    sinks: Option<Vector>,
}

fn query_scale(scale: Option<QueryScale>) -> Option<(u32, u32)> {
    scale.map(|QueryScale { beta, original }| (beta.to_bits(), original))
}

/// What a vector of values is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Term {
    /// The row of the embedding that the decided token, or that of the prompt, has.
    Embedded {
        table: TensorId,
        scale: u32,
    },
    /// What the host gives a draft.
    Given,
    Zeros,
    Normed {
        x: TermId,
        norm: NormTerm,
    },
    /// `W x + b`
    Linear {
        x: TermId,
        weight: Slice,
        cols: u32,
        bias: Option<Slice>,
    },
    Acted {
        x: TermId,
        act: Act,
    },
    /// `act(scale * gate) * up`
    Gated {
        gate: TermId,
        up: TermId,
        act: Act,
        scale: u32,
    },
    /// The same with the formula of [`ClampedSwiglu`].
    Clamped {
        gate: TermId,
        up: TermId,
        alpha: u32,
        limit: u32,
    },
    /// The experts that a rule chooses by scores, by slot.
    Chosen {
        scores: TermId,
        correction: Option<Vector>,
        rule: OpKey,
    },
    /// How much each of them counts.
    Shares {
        chosen: TermId,
    },
    /// `W_e x + b_e` for the expert e of each slot; `x` is one vector, or one for each slot.
    OfExperts {
        x: TermId,
        chosen: TermId,
        weights: Vec<(Slice, Option<Slice>)>,
        cols: u32,
    },
    /// What each slot has, times its share: one vector for each slot.
    Weighed {
        x: TermId,
        chosen: TermId,
    },
    /// The sum over slots, and the shared expert with its gate.
    Combined {
        slots: TermId,
        shares: TermId,
        shared: Option<(TermId, Option<TermId>, u32)>,
    },
    /// `x + scale * branch`
    Sum {
        x: TermId,
        scale: u32,
        branch: TermId,
    },
    /// Rows of a cache: keys have a norm and RoPE.
    Cached {
        x: TermId,
        norm: Option<QkNormTerm>,
        rope: Option<RopeTerm>,
        scales: Option<LayerId>,
    },
    Attended {
        q: TermId,
        q_norm: Option<QkNormTerm>,
        q_rope: Option<RopeTerm>,
        keys: TermId,
        values: TermId,
        scores: Scores,
    },
    /// `x * sigmoid(by)`
    OutputGated {
        x: TermId,
        by: TermId,
    },
    /// What a gated delta net leaves of the inputs at this position and at all before it.
    Mixed {
        /// q, k, v, z, b and a.
        inputs: [TermId; 6],
        conv: Vector,
        a_log: Vector,
        dt_bias: Vector,
        gains: Option<Vector>,
        rule: OpKey,
    },
    /// What an op of a rule makes of its inputs, at this position and at all before it, and of its constants, both in the order of its operands.
    Made {
        inputs: Vec<TermId>,
        constants: Vec<Vector>,
        rule: OpKey,
    },
    /// Records of split attention.
    Partial {
        of: TermId,
        splits: u32,
        heads_per_task: u32,
    },
    Logits {
        x: TermId,
        scale: u32,
        softcap: Option<u32>,
    },
    /// The best of some logits.
    Best {
        logits: TermId,
    },
    /// The token of the step.
    Token,
}

#[derive(Default)]
struct Terms {
    all: Vec<Term>,
    ids: HashMap<Term, TermId>,
}

impl Terms {
    fn id(&mut self, term: Term) -> TermId {
        if let Some(id) = self.ids.get(&term) {
            return *id;
        }
        let id = TermId(self.all.len() as u32);
        self.all.push(term.clone());
        self.ids.insert(term, id);
        id
    }

    /// For readers: two levels of a term.
    fn text(&self, graph: &ModelGraph, id: TermId, depth: u32) -> String {
        let name = |tensor: &TensorId| {
            graph.tensors.get(tensor.index()).map_or_else(|| tensor.to_string(), |tensor| format!("`{}`", tensor.name))
        };
        let slice = |slice: &Slice| format!("{}[{}, {} rows]", name(&slice.tensor), slice.first, slice.rows);
        let vector = |vector: &Option<Vector>| match vector {
            Some(vector) => vector.parts.iter().flatten().map(slice).collect::<Vec<_>>().join(", "),
            None => "no weight".to_string(),
        };
        let float = |bits: &u32| f32::from_bits(*bits);
        if depth == 0 {
            return "...".to_string();
        }
        let of = |id: &TermId| self.text(graph, *id, depth - 1);
        match &self.all[id.0 as usize] {
            Term::Embedded { table, scale } => format!("{} * {}", name(table), float(scale)),
            Term::Normed { x, norm } => format!("norm({}, {}, eps {})", of(x), vector(&norm.weight), float(&norm.eps)),
            Term::Linear { x, weight, bias, .. } => {
                let bias = bias.as_ref().map_or(String::new(), |bias| format!(" + {}", slice(bias)));
                format!("{} x ({}){bias}", slice(weight), of(x))
            }
            Term::Acted { x, act } => format!("{act:?}({})", of(x)),
            Term::Gated { gate, up, act, scale } => {
                format!("{act:?}({} * ({})) * ({})", float(scale), of(gate), of(up))
            }
            Term::Clamped { gate, up, .. } => format!("clamped({}, {})", of(gate), of(up)),
            Term::Chosen { scores, .. } => format!("choice by ({})", of(scores)),
            Term::Shares { chosen } => format!("shares of {}", of(chosen)),
            Term::OfExperts { x, chosen, weights, .. } => {
                let first = weights.first().map_or(String::new(), |(weight, _)| slice(weight));
                format!("{} experts from {first} on, by {}, x ({})", weights.len(), of(chosen), of(x))
            }
            Term::Weighed { x, chosen } => format!("({}) times shares of {}", of(x), of(chosen)),
            Term::Combined { slots, shared, .. } => {
                let shared = shared
                    .as_ref()
                    .map_or(String::new(), |(shared, _, scale)| format!(" + {} * {}", float(scale), of(shared)));
                format!("sum over slots({}){shared}", of(slots))
            }
            Term::Sum { x, scale, branch } => format!("{} + {} * {}", of(x), float(scale), of(branch)),
            Term::Cached { x, norm, rope, .. } => {
                let norm = norm.as_ref().map_or(String::new(), |norm| format!(", norm {}", vector(&norm.weight)));
                let rope = rope.as_ref().map_or(String::new(), |rope| format!(", {}", rope.table));
                format!("row of a cache({}{norm}{rope})", of(x))
            }
            Term::Attended { q, keys, values, scores, .. } => {
                format!("attention({}, {}, {}, {scores:?})", of(q), of(keys), of(values))
            }
            Term::Mixed { inputs, conv, a_log, .. } => {
                let inputs: Vec<String> = inputs.iter().map(of).collect();
                let [conv, a_log] = [conv, a_log].map(|of| vector(&Some(of.clone())));
                format!("mix({}, {conv}, {a_log})", inputs.join(", "))
            }
            Term::Made { inputs, constants, .. } => {
                let inputs: Vec<String> = inputs.iter().map(of).collect();
                let constants: Vec<String> = constants.iter().map(|of| vector(&Some(of.clone()))).collect();
                format!("made({}, {})", inputs.join(", "), constants.join(", "))
            }
            Term::OutputGated { x, by } => format!("{} * sigmoid({})", of(x), of(by)),
            Term::Partial { of: whole, splits, .. } => format!("{splits} splits of {}", of(whole)),
            Term::Logits { x, scale, .. } => format!("logits({} * {})", float(scale), of(x)),
            Term::Best { logits } => format!("best({})", of(logits)),
            Term::Given => "what a draft is given".to_string(),
            Term::Zeros => "zeros".to_string(),
            Term::Token => "token".to_string(),
        }
    }
}

fn norm_term(norm: &graph::Norm, width: u32) -> NormTerm {
    NormTerm {
        kind: norm.kind,
        eps: norm.eps.to_bits(),
        weight: norm.weight.map(|weight| Vector::whole(&[weight], width, norm.weight_offset)),
        bias: norm.bias.map(|bias| Vector::whole(&[bias], width, 0.0)),
    }
}

/// The terms of a model graph.
struct Model {
    best: TermId,
    /// Keys and values of each layer with attention.
    cached: Vec<[TermId; 2]>,
    /// All terms of the model, and those that programs have in addition.
    known: HashSet<TermId>,
}

impl Model {
    /// # Errors
    /// The layer that no program has.
    fn of(graph: &ModelGraph, program: &Program, terms: &mut Terms) -> Result<Model, usize> {
        let is_fp8 = program.precision.cache == DType::E4m3;
        let mut maker = Maker { graph, terms, is_fp8, known: HashSet::new() };
        let mut x = maker.keep(Term::Embedded { table: graph.embed, scale: graph.embed_scale.to_bits() });
        if let Some(joined) = &graph.joined {
            x = maker.joined(joined, x);
        }
        let mut cached = vec![];
        for (l, layer) in graph.layers.iter().enumerate() {
            let rows;
            (x, rows) = maker.layer(l, layer, x)?;
            cached.extend(rows);
        }
        let last = maker.normed(Some(&graph.final_norm), x);
        let head = maker.linear(&graph.head, last);
        let (scale, softcap) = (graph.logits_scale.to_bits(), graph.logits_softcap.map(f32::to_bits));
        let logits = maker.keep(Term::Logits { x: head, scale, softcap });
        let best = maker.keep(Term::Best { logits });
        Ok(Model { best, cached, known: maker.known })
    }
}

/// What a matrix of an MLP makes of a value.
type OfMatrix<'a, M> = dyn FnMut(&mut M, fn(&Mlp) -> &Linear, TermId) -> TermId + 'a;

/// Makes the terms of a model graph.
struct Maker<'a> {
    graph: &'a ModelGraph,
    terms: &'a mut Terms,
    /// Whether caches are in fp8.
    is_fp8: bool,
    known: HashSet<TermId>,
}

impl Maker<'_> {
    /// A term that grids of a program leave, or of which they leave another one.
    fn keep(&mut self, term: Term) -> TermId {
        let id = self.terms.id(term);
        self.known.insert(id);
        id
    }

    fn linear(&mut self, linear: &Linear, x: TermId) -> TermId {
        let bias = linear.bias.as_ref().map(|bias| Slice::of(bias, linear.rows));
        self.keep(Term::Linear { x, weight: Slice::of(&linear.weight, linear.rows), cols: linear.cols, bias })
    }

    fn normed(&mut self, norm: Option<&graph::Norm>, x: TermId) -> TermId {
        let Some(norm) = norm else { return x };
        self.terms.id(Term::Normed { x, norm: norm_term(norm, self.graph.hidden) })
    }

    /// What a draft makes of an embedding and of what it is given.
    fn joined(&mut self, joined: &Joined, embedded: TermId) -> TermId {
        let Joined { embedding_norm, given_norm, of_embedding, of_given } = joined;
        let (given, zeros) = (self.keep(Term::Given), self.keep(Term::Zeros));
        let branches = [(embedding_norm, of_embedding, embedded), (given_norm, of_given, given)];
        branches.into_iter().fold(zeros, |x, (norm, linear, input)| {
            let input = self.normed(Some(norm), input);
            let branch = self.linear(linear, input);
            self.keep(Term::Sum { x, scale: 1f32.to_bits(), branch })
        })
    }

    /// What a layer leaves of `x`, and its keys and values, if it has some.
    fn layer(&mut self, l: usize, layer: &graph::Layer, x: TermId) -> Result<(TermId, Option<[TermId; 2]>), usize> {
        let norm = layer.attn_norm.as_ref();
        // What is added to the residual, one after another, each with its factor.
        let (branches, rows) = match &layer.mixer {
            Mixer::Attention(attention) => {
                let input = self.normed(norm, x);
                let (attended, rows) = self.attention(l, attention, input);
                (vec![(self.linear(&attention.o, attended), 1.0)], Some(rows))
            }
            Mixer::GatedDelta(net) => {
                let input = self.normed(norm, x);
                let mixed = self.delta(net, input);
                (vec![(self.linear(&net.o, mixed), 1.0)], None)
            }
            Mixer::ShortConv(conv) => {
                let input = self.normed(norm, x);
                let mixed = self.short_conv(conv, input);
                (vec![(self.linear(&conv.o, mixed), 1.0)], None)
            }
            Mixer::Mamba2(mamba) => (vec![self.mamba(mamba, norm, x).ok_or(l)?], None),
            Mixer::SideBySide(both) => {
                let SideBySide { attention, attention_scales: [input_scale, output_scale], mamba } = &**both;
                let input = self.scaled(norm, x, *input_scale).ok_or(l)?;
                let (attended, rows) = self.attention(l, attention, input);
                let attended = (self.linear(&attention.o, attended), *output_scale);
                (vec![attended, self.mamba(mamba, norm, x).ok_or(l)?], Some(rows))
            }
        };
        let mut summed = x;
        for (branch, factor) in branches {
            // A factor is no factor of what a norm leaves.
            if layer.attn_post_norm.is_some() && factor != 1.0 {
                return Err(l);
            }
            let branch = self.normed(layer.attn_post_norm.as_ref(), branch);
            let scale = (layer.residual_scale * factor).to_bits();
            summed = self.keep(Term::Sum { x: summed, scale, branch });
        }
        let input = self.normed(layer.mlp_norm.as_ref(), if layer.parallel { x } else { summed });
        let (branch, factor) = match &layer.feed {
            FeedForward::None => return Ok((summed, rows)),
            FeedForward::Dense(mlp) => {
                (self.mlp(mlp, 1.0, input, &mut |maker, linear, x| maker.linear(linear(mlp), x)), 1.0)
            }
            FeedForward::Scaled(scaled) => {
                let ScaledMlp { mlp, gate_scale, down_scale } = &**scaled;
                if layer.mlp_post_norm.is_some() || mlp.swiglu.is_some() {
                    return Err(l);
                }
                let scale = *gate_scale;
                (self.mlp(mlp, scale, input, &mut |maker, linear, x| maker.linear(linear(mlp), x)), *down_scale)
            }
            FeedForward::Experts(experts) => (self.experts(experts, input), 1.0),
        };
        let branch = self.normed(layer.mlp_post_norm.as_ref(), branch);
        let scale = (layer.residual_scale * factor).to_bits();
        Ok((self.keep(Term::Sum { x: summed, scale, branch }), rows))
    }

    /// The normed input of a layer times a factor: that of the gains. `None`: there are none.
    fn scaled(&mut self, norm: Option<&graph::Norm>, x: TermId, by: f32) -> Option<TermId> {
        if by == 1.0 {
            return Some(self.normed(norm, x));
        }
        let mut norm = norm_term(norm?, self.graph.hidden);
        if norm.kind != NormKind::Rms || norm.bias.is_some() {
            return None;
        }
        norm.weight.as_mut()?.scale = by.to_bits();
        Some(self.terms.id(Term::Normed { x, norm }))
    }

    fn vector_of(&self, tensor: TensorId) -> Vector {
        Vector::whole(&[tensor], self.graph.tensor(tensor).count() as u32, 0.0)
    }

    /// What a short convolution leaves.
    fn short_conv(&mut self, conv: &ShortConv, input: TermId) -> TermId {
        let [b, c, x] = conv.projections().map(|projection| self.linear(projection, input));
        let constants = [conv.conv].into_iter().chain(conv.conv_bias).map(|tensor| self.vector_of(tensor)).collect();
        let rule = Op::Convolve(Convolve { channels: conv.h.rows, kernel: conv.kernel }).key();
        self.keep(Term::Made { inputs: vec![x, b, c], constants, rule })
    }

    /// What Mamba-2 adds to the residual, and its factor. `None`: no program has it.
    fn mamba(&mut self, mamba: &Mamba2, norm: Option<&graph::Norm>, x: TermId) -> Option<(TermId, f32)> {
        let input = self.scaled(norm, x, mamba.input_scale)?;
        let [z, x, b, c, step] = mamba.projections().map(|projection| self.linear(projection, input));
        let &Mamba2 { heads, head_dim, groups, state, kernel, scales: [by_z, by_x, by_b, by_c, by_step], .. } = mamba;
        let gated = mamba.norm.as_ref().is_none_or(|norm| !norm.before_gate);
        let scales = [by_x, by_b, by_c, by_step];
        let rule = Op::Scan(Scan { heads, head_dim, groups, state, kernel, scales, gate: gated.then_some(by_z) }).key();
        let constants = [Some(mamba.conv), mamba.conv_bias, Some(mamba.a_log), Some(mamba.d), Some(mamba.dt_bias)];
        let constants = constants.into_iter().flatten().map(|tensor| self.vector_of(tensor)).collect();
        let inputs = [x, b, c, step].into_iter().chain(gated.then_some(z)).collect();
        let mut mixed = self.keep(Term::Made { inputs, constants, rule });
        if let Some(GatedNorm { norm, groups, before_gate }) = &mamba.norm {
            let width = heads * head_dim;
            let term = norm_term(norm, width);
            mixed = if *groups == 1 && !before_gate {
                self.terms.id(Term::Normed { x: mixed, norm: term })
            } else {
                let (groups, gate) = (*groups, before_gate.then_some(by_z));
                let rule = Op::GroupNorm(GroupNorm { width, groups, eps: norm.eps, gate }).key();
                let inputs = [mixed].into_iter().chain(before_gate.then_some(z)).collect();
                let constants = vec![term.weight.filter(|_| norm.kind == NormKind::Rms && norm.bias.is_none())?];
                self.keep(Term::Made { inputs, constants, rule })
            };
        }
        Some((self.linear(&mamba.o, mixed), mamba.output_scale))
    }

    /// What a gated delta net leaves.
    fn delta(&mut self, net: &GatedDelta, input: TermId) -> TermId {
        let inputs = net.projections().map(|projection| self.linear(projection, input));
        let of_tensor = |&tensor: &TensorId| Some(Slice::whole(tensor, self.graph.tensor(tensor).count() as u32));
        let parts = net.conv.iter().map(of_tensor).collect();
        let conv = Vector { parts, offset: 0f32.to_bits(), scale: 1f32.to_bits() };
        let [a_log, dt_bias] = [net.a_log, net.dt_bias].map(|tensor| Vector::whole(&[tensor], net.value_heads, 0.0));
        let gains = norm_term(&net.norm, net.value_dim).weight;
        let GatedDelta { key_heads, value_heads, key_dim, value_dim, kernel, .. } = *net;
        let (eps, doubles) = (net.norm.eps, net.negative_eigenvalues);
        let rule = Op::Mix(Mix { key_heads, value_heads, key_dim, value_dim, kernel, eps, doubles }).key();
        self.keep(Term::Mixed { inputs, conv, a_log, dt_bias, gains, rule })
    }

    /// What an MLP leaves, or the chosen ones of several like `mlp`; `linear` is what one of its matrices makes, and `scale` multiplies
    /// the gate.
    fn mlp(&mut self, mlp: &Mlp, scale: f32, input: TermId, linear: &mut OfMatrix<'_, Self>) -> TermId {
        let up = linear(self, |mlp| &mlp.up, input);
        let act = match mlp.gate {
            Some(_) => {
                let gate = linear(self, |mlp| mlp.gate.as_ref().unwrap_or(&mlp.up), input);
                self.keep(match mlp.swiglu {
                    Some(ClampedSwiglu { alpha, limit }) => {
                        Term::Clamped { gate, up, alpha: alpha.to_bits(), limit: limit.to_bits() }
                    }
                    None => Term::Gated { gate, up, act: mlp.act, scale: scale.to_bits() },
                })
            }
            None => self.keep(Term::Acted { x: up, act: mlp.act }),
        };
        linear(self, |mlp| &mlp.down, act)
    }

    fn experts(&mut self, experts: &Experts, input: TermId) -> TermId {
        let (router, count) = (&experts.router, experts.experts.len() as u32);
        let scores = self.linear(&router.linear, input);
        let &Router { linear: _, top_k, score, correction, groups, normalise, scale } = router;
        let rule = Op::Route(Route { experts: count, top_k, score, groups, normalise, scale });
        let correction = correction.map(|tensor| Vector::whole(&[tensor], count, 0.0));
        let chosen = self.keep(Term::Chosen { scores, correction, rule: rule.key() });
        let shares = self.keep(Term::Shares { chosen });
        let mut of_experts = |maker: &mut Self, linear: fn(&Mlp) -> &Linear, x| {
            let all = experts.experts.iter().map(linear);
            let weights = all.map(|linear| {
                let bias = linear.bias.as_ref().map(|bias| Slice::of(bias, linear.rows));
                (Slice::of(&linear.weight, linear.rows), bias)
            });
            let cols = experts.experts.first().map_or(0, |mlp| linear(mlp).cols);
            maker.keep(Term::OfExperts { x, chosen, weights: weights.collect(), cols })
        };
        let slots = match experts.experts.first() {
            Some(first) => self.mlp(first, 1.0, input, &mut of_experts),
            None => input,
        };
        let shared = experts.shared.as_ref().map(|SharedExpert { mlp, gate, scale }| {
            let gate = gate.as_ref().map(|gate| self.linear(gate, input));
            (self.mlp(mlp, 1.0, input, &mut |maker, linear, x| maker.linear(linear(mlp), x)), gate, scale.to_bits())
        });
        self.keep(Term::Combined { slots, shares, shared })
    }

    /// What attention of a layer leaves, and its keys and values.
    fn attention(&mut self, l: usize, a: &graph::Attention, input: TermId) -> (TermId, [TermId; 2]) {
        let [q, k, v] = [&a.q, &a.k, &a.v].map(|part| self.linear(part, input));
        let gate = a.gate.as_ref().map(|gate| self.linear(gate, input));
        let rope = a.rope.map(|table| {
            let rope = &self.graph.ropes[table.index()];
            RopeTerm { table, rotary: 2 * rope.inv_freq.len() as u32, interleaved: rope.interleaved }
        });
        let qk_norm = |norm: &Option<QkNorm>, heads: u32| {
            norm.as_ref().map(|QkNorm { kind, eps, weights, weight_offset, span }| {
                let weight = Some(Vector::whole(weights, span.gains(heads, a.head_dim), *weight_offset));
                QkNormTerm { kind: *kind, eps: eps.to_bits(), span: *span, weight, after_rope: a.norm_after_rope }
            })
        };
        let scales = self.is_fp8.then(|| LayerId::from(l));
        let norm = qk_norm(&a.k_norm, a.kv_heads);
        let keys = self.keep(Term::Cached { x: k, norm, rope: rope.clone(), scales });
        let values = self.keep(Term::Cached { x: v, norm: None, rope: None, scales });
        let scores = Scores {
            heads: a.heads,
            group: a.heads / a.kv_heads,
            head_dim: a.head_dim,
            scale: a.scale.to_bits(),
            softcap: a.softcap.map(f32::to_bits),
            window: a.window,
            query_scale: query_scale(a.query_scale),
            sinks: a.sinks.map(|sinks| Vector::whole(&[sinks], a.heads, 0.0)),
        };
        let q_norm = qk_norm(&a.q_norm, a.heads);
        let attended = self.keep(Term::Attended { q, q_norm, q_rope: rope, keys, values, scores });
        let gated = gate.map(|by| self.keep(Term::OutputGated { x: attended, by }));
        (gated.unwrap_or(attended), [keys, values])
    }
}

/// Columns `lo..hi` of a buffer hold a term.
#[derive(Debug, Clone, Copy)]
struct Segment {
    lo: u32,
    hi: u32,
    term: TermId,
}

/// Where the program differs, and what is there.
type Differs = (String, String);

/// Reads a program in its order, and finds what each grid leaves.
struct Reader<'a> {
    graph: &'a ModelGraph,
    program: &'a Program,
    terms: &'a mut Terms,
    model: &'a Model,
    holds: BTreeMap<BufferId, Vec<Segment>>,
    /// Keys and values in the order in which layers append them.
    caches: Vec<([BufferId; 2], [TermId; 2])>,
    /// What a draft reads as the step before left it, and what its head reads.
    left: Option<BufferId>,
    head_input: Option<BufferId>,
}

impl Reader<'_> {
    fn program(&mut self) -> Result<(), Differs> {
        // What the select of a step reads, the step before has left.
        let mut selected = None;
        for (id, grid) in (0..).map(GridId).zip(&self.program.grids) {
            self.grid(grid, &mut selected).map_err(|what| (format!("{id} `{}`", grid.name), what))?;
        }
        let end = |what: &str| Err(("the program".to_string(), what.to_string()));
        let Some(selected) = selected else { return end("expected a `select`") };
        let best = self.holds.get(&selected).and_then(|segments| segments.first()).map(|segment| segment.term);
        if best != Some(self.model.best) {
            return end("expected arg-max pairs of the model's logits where `select` reads them");
        }
        if self.left.is_some() && self.left != self.head_input {
            return end("expected that a draft goes on with what its head reads");
        }
        let appended: Vec<[TermId; 2]> = self.caches.iter().map(|(_, terms)| *terms).collect();
        if appended != self.model.cached {
            let (expected, found) = (self.model.cached.len(), appended.len());
            return end(&format!("expected keys and values of {expected} layers in order, found {found} caches"));
        }
        Ok(())
    }

    fn grid(&mut self, grid: &Grid, selected: &mut Option<BufferId>) -> Result<(), String> {
        match &grid.op {
            Op::Select => {
                *selected = Some(need(grid, Role::Best)?.buffer);
                let token = self.terms.id(Term::Token);
                let to = need(grid, Role::Token)?;
                self.holds.insert(to.buffer, vec![Segment { lo: 0, hi: 1, term: token }]);
                Ok(())
            }
            Op::Report => self.is_token(grid),
            Op::Route(route) => {
                let scores = self.read(need(grid, Role::X)?, route.experts)?;
                let correction = grid.operand(Role::Bias).map(|operand| self.vector(operand)).transpose()?;
                let chosen = self.known(Term::Chosen { scores, correction, rule: grid.op.key() })?;
                let shares = self.known(Term::Shares { chosen })?;
                self.write(grid, Role::Out, route.top_k, chosen)?;
                self.write(grid, Role::Shares, route.top_k, shares)
            }
            Op::Mix(mix) => self.mix(grid, mix),
            Op::Convolve(op) => {
                let inputs = [Role::X, Role::B, Role::C].map(|role| (role, op.channels));
                self.made(grid, &inputs, &[Role::Conv, Role::Bias], op.channels)
            }
            Op::Scan(op) => {
                let (inner, grouped) = (op.inner(), op.groups * op.state);
                let inputs = [
                    (Role::X, inner),
                    (Role::B, grouped),
                    (Role::C, grouped),
                    (Role::Step, op.heads),
                    (Role::Gate, inner),
                ];
                let constants = [Role::Conv, Role::Bias, Role::ALog, Role::D, Role::DtBias];
                self.made(grid, &inputs, &constants, inner)
            }
            Op::GroupNorm(op) => {
                let inputs = [Role::X, Role::Gate].map(|role| (role, op.width));
                self.made(grid, &inputs, &[Role::NormWeight], op.width)
            }
            Op::Combine(combine) => {
                // Other rules have proven that inputs lie one after another.
                let first = need(grid, Role::X)?;
                let slots = self.read(first, combine.slots * combine.width)?;
                let shares = self.read(need(grid, Role::Shares)?, combine.slots)?;
                let mut shared = None;
                if let Some(scale) = combine.shared {
                    let last = grid.operands.iter().rfind(|operand| operand.role == Role::X).unwrap_or(first);
                    let gate = grid.operand(Role::Gate).map(|gate| self.read(gate, 1)).transpose()?;
                    shared = Some((self.read(last, combine.width)?, gate, scale.to_bits()));
                }
                let branch = self.known(Term::Combined { slots, shares, shared })?;
                match combine.adds {
                    true => self.add(grid, combine.width, combine.scale, branch),
                    false if combine.scale == 1.0 => self.write(grid, Role::Out, combine.width, branch),
                    false => Err(format!("expected a sum that is stored as it is, found {} times it", combine.scale)),
                }
            }
            Op::Embed { scale, .. } => {
                let term = self.embedded(grid, *scale)?;
                self.write(grid, Role::Residual, self.graph.hidden, term)?;
                self.write_if(grid, Role::Out, self.graph.hidden, term)
            }
            Op::Join { scale } => self.join(grid, *scale),
            Op::MatVec(m) => self.product(grid, m),
            Op::Attention(a) => self.attention(grid, a),
            Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => {
                let partial = need(grid, Role::Partial)?;
                let cols = grid.n * splits * (head_dim + crate::ir::op::PARTIAL_HEADER);
                let term = self.read(partial, cols)?;
                let Term::Partial { of, splits: made, heads_per_task: of_task } = self.terms.all[term.0 as usize]
                else {
                    return Err("expected records of split attention".to_string());
                };
                if (made, of_task) != (*splits, *heads_per_task) {
                    return Err(format!(
                        "expected {made} splits of {of_task} heads, found {splits} of {heads_per_task}"
                    ));
                }
                let cols = grid.n * head_dim;
                let merged = if *gate { self.gated(grid, of, cols)? } else { of };
                self.write(grid, Role::Out, cols, merged)
            }
            Op::NormAdd { norm, width, scale, .. } => {
                let y = self.read(need(grid, Role::X)?, *width)?;
                let norm = self.norm(grid, norm)?;
                let branch = self.terms.id(Term::Normed { x: y, norm });
                self.add(grid, *width, *scale, branch)
            }
        }
    }

    /// The row of the token in a table, times a scale.
    fn embedded(&mut self, grid: &Grid, scale: f32) -> Result<TermId, String> {
        self.is_token(grid)?;
        let table = need(grid, Role::Table)?;
        let buffer = &self.program.buffers[table.buffer.index()];
        let Some(Content::Tensor(tensor)) = buffer.content else {
            return Err("expected a table of the checkpoint".to_string());
        };
        self.is_stored(buffer.format(), tensor, true)?;
        self.known(Term::Embedded { table: tensor, scale: scale.to_bits() })
    }

    fn join(&mut self, grid: &Grid, scale: f32) -> Result<(), String> {
        self.left = Some(need(grid, Role::X)?.buffer);
        let embedded = self.embedded(grid, scale)?;
        let (given, zeros) = (self.known(Term::Given)?, self.known(Term::Zeros)?);
        let hidden = self.graph.hidden;
        self.write(grid, Role::Residual, hidden, zeros)?;
        self.write(grid, Role::Given, hidden, given)?;
        self.write(grid, Role::Out, hidden, embedded)
    }

    fn is_token(&mut self, grid: &Grid) -> Result<(), String> {
        let found = self.read(need(grid, Role::Token)?, 1)?;
        if self.terms.all[found.0 as usize] == Term::Token {
            Ok(())
        } else {
            Err("expected the token of the step".to_string())
        }
    }

    fn product(&mut self, grid: &Grid, m: &MatVec) -> Result<(), String> {
        let table = match need(grid, Role::Weight)?.rows {
            Rows::Lookup(table) => self.program.tables.get(table.index()),
            _ => None,
        };
        let input = need(grid, Role::X)?;
        let inputs = match table {
            // Each slot has an input of its own, or all have the same.
            Some(_) if self.program.buffers[input.buffer.index()].cols != m.k => input.cols.limit,
            _ => m.k,
        };
        let mut x = self.read(input, inputs)?;
        if let Some(norm) = &m.norm {
            let norm = self.norm(grid, norm)?;
            x = self.terms.id(Term::Normed { x, norm });
        }
        let buffer = &self.program.buffers[need(grid, Role::Weight)?.buffer.index()];
        let Some(Content::Rows { parts, .. }) = &buffer.content else {
            return Err("expected rows of linears as weights".to_string());
        };
        let biases = match grid.operand(Role::Bias) {
            None => vec![None; parts.len()],
            Some(operand) => match &self.program.buffers[operand.buffer.index()].content {
                Some(Content::Vectors { parts, offset, scale, .. }) if (*offset, *scale) == (0.0, 1.0) => {
                    parts.iter().map(|part| part.view.as_ref().map(|view| (view, part.len))).collect()
                }
                _ => return Err("expected biases without an offset".to_string()),
            },
        };
        if biases.len() != parts.len() {
            return Err(format!("expected biases of {} linears, found {}", parts.len(), biases.len()));
        }
        if let Some(table) = table {
            return self.of_experts(grid, m, table, x, buffer, parts, &biases);
        }
        let mut linears = vec![];
        for (part, bias) in parts.iter().zip(biases) {
            self.is_stored(buffer.format(), part.view.tensor, false)?;
            if bias.is_some_and(|(_, len)| len != part.rows) {
                return Err(format!("expected {} biases of a linear", part.rows));
            }
            let bias = bias.map(|(view, len)| Slice::of(view, len));
            let term = Term::Linear { x, weight: Slice::of(&part.view, part.rows), cols: m.k, bias };
            linears.push((self.known(term)?, part.rows));
        }
        match (m.epilogue, linears.as_slice()) {
            (Epilogue::Gated(act), &[(gate, rows), (up, _)]) => {
                let term = self.known(Term::Gated { gate, up, act, scale: 1f32.to_bits() })?;
                self.write(grid, Role::Out, rows, term)
            }
            (Epilogue::GatedBy { act, scale }, &[(gate, rows), (up, _)]) => {
                let term = self.known(Term::Gated { gate, up, act, scale: scale.to_bits() })?;
                self.write(grid, Role::Out, rows, term)
            }
            (Epilogue::Clamped(ClampedSwiglu { alpha, limit }), &[(gate, rows), (up, _)]) => {
                let (alpha, limit) = (alpha.to_bits(), limit.to_bits());
                let term = self.known(Term::Clamped { gate, up, alpha, limit })?;
                self.write(grid, Role::Out, rows, term)
            }
            (Epilogue::Store | Epilogue::Scores, _) => {
                let out = need(grid, Role::Out)?;
                let mut lo = out.cols.base;
                let mut segments = vec![];
                for &(term, rows) in &linears {
                    segments.push(Segment { lo, hi: lo + rows, term });
                    lo += rows;
                }
                self.put(out.buffer, segments)
            }
            (Epilogue::Act(act), &[(x, rows)]) => {
                let term = self.known(Term::Acted { x, act })?;
                self.write(grid, Role::Out, rows, term)
            }
            (Epilogue::Residual { scale }, &[(branch, rows)]) => self.add(grid, rows, scale, branch),
            (Epilogue::Logits { scale, softcap }, &[(x, rows)]) => {
                let logits = Term::Logits { x, scale: scale.to_bits(), softcap: softcap.map(f32::to_bits) };
                let logits = self.known(logits)?;
                self.write(grid, Role::Logits, rows, logits)?;
                self.head_input = Some(input.buffer);
                let best = self.terms.id(Term::Best { logits });
                let to = need(grid, Role::Best)?.buffer;
                let cols = self.program.buffers[to.index()].cols;
                self.put(to, vec![Segment { lo: 0, hi: cols, term: best }])
            }
            (_, linears) => Err(format!("expected one linear, or gate and up, found {}", linears.len())),
        }
    }

    /// Products with the experts that a table has. Parts are those of one expert after another.
    #[allow(clippy::too_many_arguments)] // What `product` has found.
    fn of_experts(
        &mut self,
        grid: &Grid,
        m: &MatVec,
        table: &Table,
        mut x: TermId,
        buffer: &Buffer,
        parts: &[Part],
        biases: &[Option<(&RowView, u32)>],
    ) -> Result<(), String> {
        let chosen = match table.home {
            // All slots of a row, though a task reads one.
            TableHome::Device(from) => self.holds.get(&from).and_then(|held| match held.as_slice() {
                [all] if (all.lo, all.hi) == (0, table.cols) => Some(all.term),
                _ => None,
            }),
            TableHome::Host => None,
        };
        let chosen = chosen.ok_or("expected the choice of the layer's experts in its table")?;
        let halves = if m.epilogue.is_gated() { 2 } else { 1 };
        let each = parts.len() / halves;
        if each != table.bound as usize || !parts.len().is_multiple_of(halves) {
            return Err(format!("expected {halves} linears of each of {} experts, found {}", table.bound, parts.len()));
        }
        if m.slots > 1 {
            x = match self.terms.all[x.0 as usize] {
                Term::Weighed { x, chosen: by } if by == chosen => x,
                _ => return Err("expected inputs that their shares have multiplied".to_string()),
            };
        }
        let mut terms = vec![];
        for half in 0..halves {
            let mut weights = vec![];
            for (part, bias) in parts.iter().zip(biases).skip(half).step_by(halves) {
                self.is_stored(buffer.format(), part.view.tensor, false)?;
                let rows = m.rows / halves as u32;
                if part.rows != rows || bias.is_some_and(|(_, len)| len != rows || m.slots > 1) {
                    return Err(format!("expected {rows} rows, and as many biases, of each expert"));
                }
                weights.push((Slice::of(&part.view, rows), bias.map(|(view, len)| Slice::of(view, len))));
            }
            terms.push(self.known(Term::OfExperts { x, chosen, weights, cols: m.k })?);
        }
        if let (&[slots], true) = (terms.as_slice(), m.slots > 1) {
            return self.sum_over_slots(grid, m, slots, chosen);
        }
        let mut term = match (m.epilogue, terms.as_slice()) {
            (Epilogue::Gated(act), &[gate, up]) => self.known(Term::Gated { gate, up, act, scale: 1f32.to_bits() })?,
            (Epilogue::Clamped(ClampedSwiglu { alpha, limit }), &[gate, up]) => {
                self.known(Term::Clamped { gate, up, alpha: alpha.to_bits(), limit: limit.to_bits() })?
            }
            (Epilogue::Act(act), &[x]) => self.known(Term::Acted { x, act })?,
            (Epilogue::Store, &[x]) => x,
            _ => return Err("expected a product of experts that is stored or activated".to_string()),
        };
        if let Some(shares) = grid.operand(Role::Shares) {
            let (of_slots, expected) = (self.read(shares, table.cols)?, self.known(Term::Shares { chosen })?);
            if of_slots != expected {
                return Err("expected the shares of the slots that the product is of".to_string());
            }
            term = self.terms.id(Term::Weighed { x: term, chosen });
        }
        // Slots are padded to whole units.
        let out = need(grid, Role::Out)?.cols;
        self.write(grid, Role::Out, out.limit.saturating_sub(out.base), term)
    }

    /// A product that adds up what the experts of all slots made, for inputs that their shares have multiplied.
    fn sum_over_slots(&mut self, grid: &Grid, m: &MatVec, slots: TermId, chosen: TermId) -> Result<(), String> {
        let shares = self.known(Term::Shares { chosen })?;
        let branch = self.known(Term::Combined { slots, shares, shared: None })?;
        match m.epilogue {
            Epilogue::Residual { scale } => self.add(grid, m.rows, scale, branch),
            Epilogue::Store => self.write(grid, Role::Out, m.rows, branch),
            _ => Err("expected a sum over slots that is stored or added".to_string()),
        }
    }

    /// `residual += scale * branch`, published where the grid has an output.
    fn add(&mut self, grid: &Grid, width: u32, scale: f32, branch: TermId) -> Result<(), String> {
        let residual = need(grid, Role::Residual)?;
        let x = self.read(residual, width)?;
        let term = self.known(Term::Sum { x, scale: scale.to_bits(), branch })?;
        self.holds.remove(&residual.buffer);
        self.write(grid, Role::Residual, width, term)?;
        self.write_if(grid, Role::Out, width, term)
    }

    fn norm(&self, grid: &Grid, norm: &NormAttr) -> Result<NormTerm, String> {
        let vector = |role| grid.operand(role).map(|operand| self.vector(operand)).transpose();
        let (weight, bias) = (vector(Role::NormWeight)?, vector(Role::NormBias)?);
        Ok(NormTerm { kind: norm.kind, eps: norm.eps.to_bits(), weight, bias })
    }

    fn vector(&self, operand: &Operand) -> Result<Vector, String> {
        let content = self.program.buffers[operand.buffer.index()].content.as_ref();
        content
            .and_then(Vector::of)
            .ok_or_else(|| format!("expected vectors of the checkpoint as `{}`", operand.role.name()))
    }

    fn attention(&mut self, grid: &Grid, a: &Attention) -> Result<(), String> {
        let (q_cols, kv_cols) = (a.heads * a.head_dim, a.kv_heads() * a.head_dim);
        let q = self.read(need(grid, Role::Q)?, q_cols)?;
        let k = self.read(need(grid, Role::K)?, kv_cols)?;
        let v = self.read(need(grid, Role::V)?, kv_cols)?;
        let qk_norm = |norm: &Option<QkNormAttr>, role| -> Result<Option<QkNormTerm>, String> {
            let Some(QkNormAttr { norm, span }) = norm else { return Ok(None) };
            let weight = grid.operand(role).map(|operand| self.vector(operand)).transpose()?;
            let after_rope = a.norm_after_rope;
            Ok(Some(QkNormTerm { kind: norm.kind, eps: norm.eps.to_bits(), span: *span, weight, after_rope }))
        };
        let (q_norm, k_norm) = (qk_norm(&a.q_norm, Role::QNormWeight)?, qk_norm(&a.k_norm, Role::KNormWeight)?);
        let content =
            |role| grid.operand(role).and_then(|operand| self.program.buffers[operand.buffer.index()].content.as_ref());
        let rope = match content(Role::Rope) {
            Some(Content::RopeTable(table)) => {
                Some(RopeTerm { table: *table, rotary: a.rotary, interleaved: a.interleaved })
            }
            _ => None,
        };
        let scales = match content(Role::CacheScales) {
            Some(Content::CacheScales(layer)) => Some(*layer),
            _ => None,
        };
        let keys = self.known(Term::Cached { x: k, norm: k_norm, rope: rope.clone(), scales })?;
        let values = self.known(Term::Cached { x: v, norm: None, rope: None, scales })?;
        self.append(grid, keys, values)?;
        let scores = Scores {
            heads: a.heads,
            group: a.group,
            head_dim: a.head_dim,
            scale: a.scale.to_bits(),
            softcap: a.softcap.map(f32::to_bits),
            window: a.window,
            query_scale: query_scale(a.query_scale),
            sinks: if a.sinks { Some(self.vector(need(grid, Role::Sinks)?)?) } else { None },
        };
        let attended = self.known(Term::Attended { q, q_norm, q_rope: rope, keys, values, scores })?;
        if a.splits == 1 {
            let made = if a.gate { self.gated(grid, attended, q_cols)? } else { attended };
            return self.write(grid, Role::Out, q_cols, made);
        }
        let cols = a.heads * a.splits * (a.head_dim + crate::ir::op::PARTIAL_HEADER);
        let partial = Term::Partial { of: attended, splits: a.splits, heads_per_task: a.heads_per_task };
        let term = self.terms.id(partial);
        self.write(grid, Role::Out, cols, term)
    }

    /// A state is that of one grid (`state`), so what it leaves follows from the inputs of this grid in all steps.
    fn mix(&mut self, grid: &Grid, mix: &Mix) -> Result<(), String> {
        let (keys, values) = (mix.key_heads * mix.key_dim, mix.value_heads * mix.value_dim);
        let read = |role, cols| self.read(need(grid, role)?, cols);
        let inputs = [
            read(Role::Q, keys)?,
            read(Role::K, keys)?,
            read(Role::V, values)?,
            read(Role::Gate, values)?,
            read(Role::Beta, mix.value_heads)?,
            read(Role::Decay, mix.value_heads)?,
        ];
        let vector = |role| self.vector(need(grid, role)?);
        let (conv, a_log, dt_bias) = (vector(Role::Conv)?, vector(Role::ALog)?, vector(Role::DtBias)?);
        let (gains, rule) = (Some(vector(Role::NormWeight)?), Op::Mix(*mix).key());
        let term = self.known(Term::Mixed { inputs, conv, a_log, dt_bias, gains, rule })?;
        self.write(grid, Role::Out, values, term)
    }

    /// What an op makes of its inputs and constants, of those that it has. A state is that of one grid, as above.
    fn made(&mut self, grid: &Grid, inputs: &[(Role, u32)], constants: &[Role], cols: u32) -> Result<(), String> {
        let inputs = inputs.iter().filter_map(|(role, cols)| Some(self.read(grid.operand(*role)?, *cols)));
        let inputs = inputs.collect::<Result<_, _>>()?;
        let constants = constants.iter().filter_map(|role| Some(self.vector(grid.operand(*role)?)));
        let constants = constants.collect::<Result<_, _>>()?;
        let term = self.known(Term::Made { inputs, constants, rule: grid.op.key() })?;
        self.write(grid, Role::Out, cols, term)
    }

    /// Heads times the gates that a grid reads.
    fn gated(&mut self, grid: &Grid, x: TermId, cols: u32) -> Result<TermId, String> {
        let by = self.read(need(grid, Role::Gate)?, cols)?;
        self.known(Term::OutputGated { x, by })
    }

    /// Attention reads the history of the caches to which it appends, and no other layer has them. Attention of other regimes appends the
    /// same rows to the same caches.
    fn append(&mut self, grid: &Grid, keys: TermId, values: TermId) -> Result<(), String> {
        let appended = [need(grid, Role::AppendK)?, need(grid, Role::AppendV)?].map(|operand| operand.buffer);
        let read = [need(grid, Role::HistoryK)?, need(grid, Role::HistoryV)?].map(|operand| operand.buffer);
        if read != appended {
            return Err("expected the history of the caches that it appends to".to_string());
        }
        let other = |(buffers, terms): &&([BufferId; 2], [TermId; 2])| {
            buffers.iter().any(|buffer| appended.contains(buffer)) || terms.contains(&keys) || terms.contains(&values)
        };
        match self.caches.iter().find(other) {
            None => self.caches.push((appended, [keys, values])),
            Some(found) if *found == (appended, [keys, values]) => {}
            Some(_) => return Err("expected caches of its own layer".to_string()),
        }
        Ok(())
    }

    /// A term that the model has.
    fn known(&mut self, term: Term) -> Result<TermId, String> {
        let id = self.terms.id(term);
        match self.model.known.contains(&id) {
            true => Ok(id),
            false => Err(format!("computes {}, which the model does not have", self.terms.text(self.graph, id, 3))),
        }
    }

    /// Weights of `tensor` are stored as the checkpoint, or the precision, has them, or in fp32, which holds all values. A row of a table
    /// has its scales by themselves.
    fn is_stored(&self, format: Format, tensor: TensorId, is_table: bool) -> Result<(), String> {
        let stored = self.graph.formats.get(&tensor).copied();
        let mut expected = stored.unwrap_or(Format::plain(self.program.precision.weights));
        if let Some(groups) = expected.groups.as_mut().filter(|of| is_table && of.scale == ScaleCode::F16x6) {
            groups.scale = ScaleCode::F32;
        }
        if [expected, Format::plain(DType::F32)].contains(&format) {
            return Ok(());
        }
        Err(format!("expected weights of {tensor} in {expected}, found {format}"))
    }

    /// What `cols` columns hold, from where the operand begins.
    fn read(&self, operand: &Operand, cols: u32) -> Result<TermId, String> {
        let (lo, buffer) = (operand.cols.base, operand.buffer);
        let segments = self.holds.get(&buffer).map(Vec::as_slice).unwrap_or_default();
        let found = segments.iter().find(|segment| (segment.lo, segment.hi) == (lo, lo.saturating_add(cols)));
        found.map(|segment| segment.term).ok_or_else(|| {
            let name = operand.role.name();
            format!(
                "expected one vector in columns {lo}..{} of {buffer}, which it reads as `{name}`",
                lo.saturating_add(cols)
            )
        })
    }

    fn write(&mut self, grid: &Grid, role: Role, cols: u32, term: TermId) -> Result<(), String> {
        let operand = need(grid, role)?;
        let lo = operand.cols.base;
        self.put(operand.buffer, vec![Segment { lo, hi: lo.saturating_add(cols), term }])
    }

    fn write_if(&mut self, grid: &Grid, role: Role, cols: u32, term: TermId) -> Result<(), String> {
        if grid.operand(role).is_some() { self.write(grid, role, cols, term) } else { Ok(()) }
    }

    /// Values that are made twice, by attention of several regimes, are the same.
    fn put(&mut self, buffer: BufferId, segments: Vec<Segment>) -> Result<(), String> {
        let held = self.holds.entry(buffer).or_default();
        for segment in segments {
            match held.iter().find(|held| held.lo < segment.hi && segment.lo < held.hi) {
                None => held.push(segment),
                Some(held) if (held.lo, held.hi, held.term) == (segment.lo, segment.hi, segment.term) => {}
                Some(_) => return Err(format!("writes columns of {buffer} that hold another value")),
            }
        }
        Ok(())
    }
}

fn need(grid: &Grid, role: Role) -> Result<&Operand, String> {
    grid.operand(role).ok_or_else(|| format!("expected an operand `{}`", role.name()))
}
