//! Owns the experts of a plan: their numbers, the names of their tensors, and their part of the graph.

use safetensors::Dtype;

use super::{Collector, Placed, Plan};
use crate::dtype::DType;
use crate::model::config::quantised::Parts;
use crate::model::graph::{
    ClampedSwiglu, ExpertGroups, Experts, Linear, Mlp, Router, RowView, Score, SharedExpert, Tensor, TensorId,
};

/// Layers with experts in the place of an MLP.
#[derive(Debug, Clone)]
pub struct ExpertsPlan {
    pub names: &'static ExpertNames,
    /// Whether a layer has experts, or the MLP of the plan.
    pub layers: Vec<bool>,
    pub count: u32,
    /// Width of an expert.
    pub width: u32,
    pub top_k: u32,
    pub score: Score,
    /// Whether the choice is corrected; see [`Router::correction`].
    pub corrected: bool,
    pub groups: Option<ExpertGroups>,
    pub normalise: Option<f32>,
    pub scale: f32,
    pub router_bias: bool,
    /// Whether every projection of an expert has a bias.
    pub bias: bool,
    /// Whether the shared expert has a gate, as the experts of its names have.
    pub gated: bool,
    pub swiglu: Option<ClampedSwiglu>,
    pub shared: Option<SharedPlan>,
}

/// The shared expert of a layer.
#[derive(Debug, Clone, Copy)]
pub struct SharedPlan {
    pub width: u32,
    pub gated: bool,
    pub scale: f32,
}

/// Names of the tensors of experts in a layer. Of several, the first that the files have counts: checkpoints as they are published,
/// then as transformers 5 names modules inside and writes them if it is asked to.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNames {
    /// Modules.
    pub router: &'static [&'static str],
    /// Tensors.
    pub correction: &'static [&'static str],
    /// Whether the correction is stored as `[1, experts]`.
    pub correction_row: bool,
    /// Each expert with modules of its own.
    pub each: Option<Each>,
    pub stacked: &'static [Stacked],
    pub shared: &'static [SharedNames],
    /// Module.
    pub shared_gate: &'static str,
}

/// Modules of the shared expert.
#[derive(Debug, Clone, Copy)]
pub struct SharedNames {
    /// `None`: there is none, or `up` holds the rows of gate, then those of up.
    pub gate: Option<&'static str>,
    pub up: &'static str,
    pub down: &'static str,
}

/// Modules of an expert, with [`EXPERT`] in them.
#[derive(Debug, Clone, Copy)]
pub struct Each {
    /// `None`: experts have no gate.
    pub gate: Option<&'static str>,
    pub up: &'static str,
    pub down: &'static str,
}

/// Stands for the id of an expert in the names of its modules.
pub const EXPERT: &str = "{expert}";

/// Tensors with the matrices of all experts of a layer, `[experts, rows, cols]`, and their biases, `[experts, rows]`.
#[derive(Debug, Clone, Copy)]
pub struct Stacked {
    pub gate_up: GateUp,
    pub down: &'static str,
    /// What follows these names in those of the weights, and of the biases.
    pub weight: &'static str,
    pub bias: &'static str,
    /// Whether the files have each matrix transposed.
    pub transposed: bool,
}

/// How the rows of gate and up lie.
#[derive(Debug, Clone, Copy)]
pub enum GateUp {
    Separate {
        gate: &'static str,
        up: &'static str,
    },
    /// Of each expert the rows of gate, then those of up.
    Halves(&'static str),
    /// Of each expert a row of gate, then one of up, and so on (gpt-oss).
    Alternating(&'static str),
    /// Experts have no gate (Nemotron-H).
    Up(&'static str),
}

impl GateUp {
    fn first(&self) -> &'static str {
        match self {
            GateUp::Separate { gate: name, .. }
            | GateUp::Halves(name)
            | GateUp::Alternating(name)
            | GateUp::Up(name) => name,
        }
    }
}

/// The experts of a layer, whose tensors have their names by `path`.
pub fn assemble(c: &mut Collector, plan: &Plan, e: &ExpertsPlan, path: &dyn Fn(&str) -> String) -> Experts {
    let (names, hidden) = (e.names, plan.hidden);
    let module = c.of_names(names.router, path, ".weight");
    let linear = c.choosing(&module, e.count, hidden, e.router_bias);
    let correction = e.corrected.then(|| {
        let name = c.of_names(names.correction, path, "");
        let row = [1, e.count];
        c.want(name, if names.correction_row { &row } else { &row[1..] })
    });
    let there = |c: &Collector, name: &str| c.files.is_some_and(|files| files.contains_key(name));
    let is_stack = |stacked: &&Stacked| there(c, &format!("{}{}", path(stacked.gate_up.first()), stacked.weight));
    let first = names.stacked.first().filter(|_| names.each.is_none());
    let experts = match (names.stacked.iter().find(is_stack).or(first), &names.each) {
        (Some(stacked), _) => of_stack(c, plan, e, stacked, path),
        (None, Some(each)) => (0..e.count).map(|id| of_own(c, plan, e, each, id, path)).collect(),
        (None, None) => vec![],
    };
    let shared = e.shared.map(|SharedPlan { width, gated, scale }| {
        let at = names.shared.iter().position(|names| there(c, &format!("{}.weight", path(names.up)))).unwrap_or(0);
        let SharedNames { gate, up, down } = names.shared[at];
        let (gate, up) = match gate.filter(|_| e.gated) {
            Some(gate) => (Some(c.whole(&path(gate), width, hidden, false)), c.whole(&path(up), width, hidden, false)),
            None if e.gated => {
                let mut part = |first| c.linear(&path(up), Placed::range(2 * width, first), width, hidden, false);
                (Some(part(0)), part(width))
            }
            None => (None, c.whole(&path(up), width, hidden, false)),
        };
        let mlp = Mlp { act: plan.act, gate, up, down: c.whole(&path(down), hidden, width, false), swiglu: None };
        SharedExpert { mlp, gate: gated.then(|| c.choosing(&path(names.shared_gate), 1, hidden, false)), scale }
    });
    let &ExpertsPlan { top_k, score, groups, normalise, scale, .. } = e;
    Experts { router: Router { linear, top_k, score, correction, groups, normalise, scale }, experts, shared }
}

/// An expert with modules of its own.
fn of_own(c: &mut Collector, plan: &Plan, e: &ExpertsPlan, each: &Each, id: u32, path: &dyn Fn(&str) -> String) -> Mlp {
    let named = |module: &str| path(module).replace(EXPERT, &id.to_string());
    let (hidden, width) = (plan.hidden, e.width);
    Mlp {
        act: plan.act,
        gate: each.gate.map(|gate| c.whole(&named(gate), width, hidden, e.bias)),
        up: c.whole(&named(each.up), width, hidden, e.bias),
        down: c.whole(&named(each.down), hidden, width, e.bias),
        swiglu: e.swiglu,
    }
}

/// All experts of a layer, whose matrices lie one after another in few tensors.
fn of_stack(
    c: &mut Collector,
    plan: &Plan,
    e: &ExpertsPlan,
    stacked: &Stacked,
    path: &dyn Fn(&str) -> String,
) -> Vec<Mlp> {
    let (count, hidden, width) = (e.count, plan.hidden, e.width);
    // A tensor and the one of its biases, with `rows` rows for each expert.
    let mut both = |name: &str, rows: u32, cols: u32| {
        let weight = c.stack(&path(name), stacked, [count, rows, cols]);
        let bias = e.bias.then(|| c.want(format!("{}{}", path(name), stacked.bias), &[count, rows]));
        (weight, bias)
    };
    // Rows of an expert in a tensor with `rows` rows for each, from `first` on, every `stride`-th.
    let of = |(weight, bias): (TensorId, Option<TensorId>), first: u32, stride: u32, [rows, cols]: [u32; 2]| {
        let view = |tensor| RowView { tensor, first, block: 1, stride };
        Linear { weight: view(weight), bias: bias.map(view), rows, cols }
    };
    let up_shape = [width, hidden];
    let (gate, up, each, second, stride) = match stacked.gate_up {
        GateUp::Separate { gate, up } => (Some(both(gate, width, hidden)), both(up, width, hidden), width, 0, 1),
        GateUp::Halves(name) => {
            let both = both(name, 2 * width, hidden);
            (Some(both), both, 2 * width, width, 1)
        }
        GateUp::Alternating(name) => {
            let both = both(name, 2 * width, hidden);
            (Some(both), both, 2 * width, 1, 2)
        }
        GateUp::Up(name) => (None, both(name, width, hidden), width, 0, 1),
    };
    let down = both(stacked.down, hidden, width);
    let expert = |id: u32| Mlp {
        act: plan.act,
        gate: gate.map(|gate| of(gate, id * each, stride, up_shape)),
        up: of(up, id * each + second, stride, up_shape),
        down: of(down, id * hidden, 1, [hidden, width]),
        swiglu: e.swiglu,
    };
    (0..count).map(expert).collect()
}

impl Collector<'_> {
    /// The first of several names that the files have, with `suffix`; else the first of all.
    fn of_names(&self, names: &[&str], path: &dyn Fn(&str) -> String, suffix: &str) -> String {
        let there =
            |name: &&&str| self.files.is_some_and(|files| files.contains_key(&format!("{}{suffix}", path(name))));
        path(names.iter().find(there).or(names.first()).copied().unwrap_or_default())
    }

    /// A router, or the gate of a shared expert. Where the files have it as values it is one of values: methods of quantisation leave it
    /// as it is, and not all of them say so (GPTQ).
    fn choosing(&mut self, module: &str, rows: u32, cols: u32, bias: bool) -> Linear {
        let name = format!("{module}.weight");
        let floats = [Dtype::F32, Dtype::BF16, Dtype::F16];
        let found = self.files.and_then(|files| files.get(&name));
        if !found.is_some_and(|found| floats.contains(&found.dtype)) {
            return self.whole(module, rows, cols, bias);
        }
        // A file of GGUF has a matrix of one row as a vector.
        let shape = [rows, cols];
        let shape = if rows == 1 && found.is_some_and(|found| found.shape.len() == 1) { &shape[1..] } else { &shape };
        let weight = RowView::range(self.want(name, shape), 0);
        let bias = bias.then(|| RowView::range(self.want(format!("{module}.bias"), &[rows]), 0));
        Linear { weight, bias, rows, cols }
    }

    /// The id of a tensor of stacked matrices.
    fn stack(&mut self, module: &str, stacked: &Stacked, shape: [u32; 3]) -> TensorId {
        let name = format!("{module}{}", stacked.weight);
        let in_blocks = self.quantisation.is_some_and(|quantisation| quantisation.blocks_of_experts());
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        let id = TensorId::from(self.tensors.len());
        let [count, rows, cols] = shape;
        let dtype = match self.files {
            Some(files) if in_blocks => {
                let mut parts = Parts { files, used: &mut self.parts, reasons: &mut self.reasons };
                self.recipes.extend(parts.stacked_blocks(&name, shape).map(|recipe| (id, recipe)));
                DType::F32
            }
            Some(files) if stacked.transposed => {
                self.transposed.insert(id);
                self.check(files.get(&name), &name, &[count, cols, rows])
            }
            _ => return self.want(name, &shape),
        };
        self.ids.insert(name.clone(), id);
        self.tensors.push(Tensor { name, dtype, shape: shape.to_vec() });
        id
    }
}
