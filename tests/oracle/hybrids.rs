//! Owns bases that a plain decoder does not have: layers with a recurrent state beside or in the place of a history, and schedules over several
//! devices.

use super::bases::{Base, FAMILIES, of};
use super::explore::Rng;
use crate::proof_support::{BF16, FP32, MIXTURE, TOY, Toy, beyond_kernels, cpu, h200, on_cpu, on_h200, two_devices_on};
use monobloc::candidate::{Candidate, Infeasible};
use monobloc::dtype::DType;
use monobloc::ir::layout;
use monobloc::ir::op::Role;
use monobloc::ir::program::{Home, Space};
use monobloc::ir::schedule::{Schedule, Scope};
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::graph::{
    GatedDelta, GatedNorm, Linear, Mamba2, Mixer, ModelGraph, Norm, NormKind, RowView, ShortConv, SideBySide, Tensor,
    TensorId,
};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::check;

/// Widths of the heads of states: small ones, or those of tensor cores.
#[derive(Debug, Clone, Copy)]
pub struct Widths {
    pub keys: [u32; 3],
    pub values: [u32; 3],
}

const SMALL: Widths = Widths { keys: [2, 4, 8], values: [2, 4, 8] };

/// Adds nets to a graph, with their tensors.
struct Nets<'a> {
    graph: &'a mut ModelGraph,
    widths: Widths,
}

impl Nets<'_> {
    fn tensor(&mut self, shape: &[u32]) -> TensorId {
        let id = TensorId::from(self.graph.tensors.len());
        let shape = shape.to_vec();
        self.graph.tensors.push(Tensor { name: format!("t{}", id.index()), dtype: DType::F32, shape });
        id
    }

    fn linear(&mut self, rows: u32, cols: u32) -> Linear {
        Linear { weight: RowView::range(self.tensor(&[rows, cols]), 0), bias: None, rows, cols }
    }

    fn gains(&mut self, width: u32) -> Norm {
        let weight = Some(self.tensor(&[width]));
        Norm { kind: NormKind::Rms, eps: 1e-5, weight, weight_offset: 0.0, bias: None }
    }

    fn delta(&mut self, random: &mut Rng) -> GatedDelta {
        let hidden = self.graph.hidden;
        let (key_heads, value_heads) = of(random, &[(1, 2), (2, 2), (2, 4)]);
        let (key_dim, value_dim) = (of(random, &self.widths.keys), of(random, &self.widths.values));
        let kernel = 1 + random.below(3) as u32;
        let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
        let [q, k] = [keys; 2].map(|rows| self.linear(rows, hidden));
        let [v, z] = [values; 2].map(|rows| self.linear(rows, hidden));
        let [b, a] = [value_heads; 2].map(|rows| self.linear(rows, hidden));
        GatedDelta {
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
            conv: vec![self.tensor(&[2 * keys + values, kernel])],
            a_log: self.tensor(&[value_heads]),
            dt_bias: self.tensor(&[value_heads]),
            norm: self.gains(value_dim),
            negative_eigenvalues: random.below(2) == 0,
            o: self.linear(hidden, values),
        }
    }

    fn convolution(&mut self, random: &mut Rng) -> ShortConv {
        let (hidden, kernel) = (self.graph.hidden, 2 + random.below(2) as u32);
        let [b, c, h, o] = [hidden; 4].map(|rows| self.linear(rows, hidden));
        let conv_bias = (random.below(2) == 0).then(|| self.tensor(&[hidden]));
        ShortConv { kernel, b, c, h, conv: self.tensor(&[hidden, kernel]), conv_bias, o }
    }

    fn mamba(&mut self, random: &mut Rng) -> Mamba2 {
        let hidden = self.graph.hidden;
        let (heads, groups) = of(random, &[(2, 1), (2, 2), (4, 2)]);
        let (head_dim, state) = (of(random, &[2, 4, 8]), of(random, &[2, 4]));
        let kernel = 2 + random.below(2) as u32;
        let (inner, grouped) = (heads * head_dim, groups * state);
        let channels = inner + 2 * grouped;
        let norm = (random.below(2) == 0).then(|| GatedNorm {
            norm: self.gains(inner),
            groups: of(random, &[1, groups]),
            before_gate: random.below(2) == 0,
        });
        Mamba2 {
            heads,
            head_dim,
            groups,
            state,
            kernel,
            z: self.linear(inner, hidden),
            h: self.linear(inner, hidden),
            b: self.linear(grouped, hidden),
            c: self.linear(grouped, hidden),
            dt: self.linear(heads, hidden),
            input_scale: 1.0,
            scales: [1.0; 5],
            conv: self.tensor(&[channels, kernel]),
            conv_bias: (random.below(2) == 0).then(|| self.tensor(&[channels])),
            a_log: self.tensor(&[heads]),
            d: self.tensor(&[heads]),
            dt_bias: self.tensor(&[heads]),
            norm,
            o: self.linear(hidden, inner),
            output_scale: 1.0,
        }
    }
}

/// Gives layers of a graph a recurrent state of any kind: one of them at least, and one layer at least keeps its history.
pub(super) fn with_states(random: &mut Rng, graph: &mut ModelGraph) {
    let (first, history) = (random.below(graph.layers.len()), random.below(graph.layers.len()));
    for layer in 0..graph.layers.len() {
        if layer != first && random.below(2) == 0 {
            continue;
        }
        let mixer = graph.layers[layer].mixer.clone();
        let plain = graph.layers[layer].attn_post_norm.is_none();
        let mut nets = Nets { graph, widths: SMALL };
        let kinds = if layer == history { 1 } else { 4 };
        let net = match (random.below(kinds), mixer) {
            (0, Mixer::Attention(attention)) if plain => {
                let mamba = nets.mamba(random);
                Mixer::SideBySide(Box::new(SideBySide { attention, attention_scales: [1.0; 2], mamba }))
            }
            (1, _) => Mixer::ShortConv(Box::new(nets.convolution(random))),
            (2, _) => Mixer::Mamba2(Box::new(nets.mamba(random))),
            (3, _) => Mixer::GatedDelta(Box::new(nets.delta(random))),
            _ => continue,
        };
        graph.layers[layer].mixer = net;
    }
}

/// Gives all layers but one of a graph a gated delta net, with heads of these widths.
pub fn with_deltas(random: &mut Rng, graph: &mut ModelGraph, widths: Widths) {
    let history = random.below(graph.layers.len());
    for layer in (0..graph.layers.len()).filter(|layer| *layer != history) {
        let net = Nets { graph, widths }.delta(random);
        graph.layers[layer].mixer = Mixer::GatedDelta(Box::new(net));
    }
}

/// A decoder with recurrent states: steps of one row, alone or over a pool of pages, or of several rows, with packets, counters or words; sometimes
/// with experts.
pub fn hybrid(random: &mut Rng) -> Base {
    loop {
        if let Some(base) = any_hybrid(random) {
            return base;
        }
    }
}

/// The same with a net that divides the sequences among its tasks, if that is soon drawn.
pub fn divided(random: &mut Rng) -> Base {
    let divides = |base: &Base| base.schedule.program.grids.iter().any(|grid| grid.parts() > 1);
    (0..400).map(|_| hybrid(random)).find(divides).unwrap_or_else(|| hybrid(random))
}

/// The same with two nets at least, if that is soon drawn.
pub fn of_two_nets(random: &mut Rng) -> Base {
    let nets =
        |base: &Base| base.schedule.program.grids.iter().filter(|grid| grid.operand(Role::State).is_some()).count();
    (0..40).map(|_| hybrid(random)).find(|base| nets(base) > 1).unwrap_or_else(|| hybrid(random))
}

fn any_hybrid(random: &mut Rng) -> Option<Base> {
    let on_gpu = random.below(3) != 0;
    let rows = of(random, &[0, 0, 1, 2, 3]);
    let words = on_gpu && rows > 1 && random.below(2) == 0;
    let (heads, kv_heads) = of(random, &[(1, 1), (2, 1), (2, 2)]);
    let toy = Toy {
        layers: of(random, &[2, 2, 3]),
        hidden: of(random, &[8, 16]),
        heads,
        kv_heads,
        dim: 8,
        // Slots of words begin with spans.
        intermediate: if words { 32 } else { 16 },
        vocab: 24,
        context: of(random, &[6, 8]),
        bias: random.below(3) == 0,
        post_norms: random.below(4) == 0,
        precision: of(random, &[BF16, BF16, FP32]),
        mixture: (random.below(4) == 0).then_some(MIXTURE),
        ..TOY
    };
    let mut graph = toy.graph();
    with_states(random, &mut graph);
    if !graph.layers.iter().any(|layer| !matches!(layer.mixer, Mixer::Attention(_))) {
        return None;
    }
    let sms = of(random, &[2, 2, 3, 4, 6]);
    let machine = if on_gpu { h200() } else { cpu() };
    let candidate = if on_gpu { on_h200(sms) } else { on_cpu(sms) };
    let splits = if rows == 0 { of(random, &[1, 2]) } else { 1 };
    let candidate = Candidate { splits, split_from: of(random, &[2, 3, 5]), ..candidate };
    let placed = match rows {
        0 => lower(&graph, "hybrid", toy.precision, toy.context, &candidate)
            .and_then(|program| schedule(program, &machine, &candidate)),
        _ => in_rows(&graph, &toy, rows, words, &machine, &candidate),
    };
    // Kernels of a pool, and of several rows, have limits that are judged elsewhere.
    let target = if rows > 0 && on_gpu { beyond_kernels() } else { machine };
    Some(Base { name: format!("hybrid, {rows} rows"), schedule: placed.ok()?, target })
}

fn in_rows(
    graph: &ModelGraph,
    toy: &Toy,
    rows: u32,
    words: bool,
    machine: &Target,
    candidate: &Candidate,
) -> Result<Schedule, Infeasible> {
    let held = layout::chunk_rows(candidate.slot_bytes, layout::cache_row_bytes(toy.dim, toy.precision.cache));
    let page_rows = if words { held } else { 4 };
    let pages = (rows + 1) * toy.context.div_ceil(page_rows.max(1));
    let batch = Batch { rows, sequences: rows + 1, pages, page_rows, words };
    let program = lower_batch(graph, "hybrid", toy.precision, toy.context, &batch, candidate)?;
    schedule(program, machine, candidate)
}

/// Decoders of any family on the SMs of two to four devices. Which KV heads are on which device follows from the schedule, so it is drawn
/// again until no history is read on another device than the one that appends it.
pub fn fleet(random: &mut Rng) -> Base {
    let on_gpu = random.below(3) != 0;
    let (machine, target) = if on_gpu { (h200(), beyond_kernels()) } else { (cpu(), cpu()) };
    for _ in 0..24 {
        let devices = of(random, &[2, 2, 3, 4]);
        let sms = devices * of(random, &[1, 2]);
        let (name, family) = of(random, &FAMILIES);
        let rows = of(random, &[1, 1, 2]);
        let small = Toy { layers: of(random, &[1, 2]), hidden: 32, heads: 4, kv_heads: devices.min(4), ..family };
        let heads = if small.kv_heads == 3 { 3 } else { 4 };
        let toy =
            Toy { heads, dim: 8, intermediate: 32, vocab: 32, context: 8, window: family.window.map(|_| 2), ..small };
        let candidate = if on_gpu { on_h200(sms) } else { on_cpu(sms) };
        let candidate = Candidate { splits: 1, heads_per_task: 1, ..candidate };
        let mut graph = toy.graph();
        if random.below(3) == 0 && toy.layers > 1 && !toy.parallel {
            with_states(random, &mut graph);
        }
        let placed = match rows {
            1 => lower(&graph, name, toy.precision, toy.context, &candidate)
                .and_then(|program| schedule(program, &machine, &candidate)),
            _ => in_rows(&graph, &toy, rows, false, &machine, &candidate),
        };
        let Ok(mut schedule) = placed else { continue };
        over_devices(&mut schedule, devices);
        if check(&schedule, &target).is_empty() {
            return Base { name: format!("{devices} devices, {rows} rows, {name}"), schedule, target };
        }
    }
    let candidate = if on_gpu { on_h200(4) } else { on_cpu(4) };
    Base { name: "two devices".into(), schedule: two_devices_on(&machine, &candidate), target }
}

/// Spreads the SMs over devices, each of which has all buffers; every event reaches all of them.
fn over_devices(s: &mut Schedule, devices: u32) {
    s.machine.devices = devices;
    for buffer in s.program.buffers.iter_mut().filter(|buffer| buffer.space != Space::Private) {
        buffer.home = Home::Everywhere;
    }
    s.regimes.iter_mut().flat_map(|regime| &mut regime.events).for_each(|event| event.scope = Scope::System);
}
