//! Tests the importer and the reference against goldens of transformers, for every family.

use std::collections::BTreeMap;

use monobloc::model::config::{Imported, import};
use monobloc::model::graph::{
    Act, Attention, Experts, FeedForward, GatedDelta, Layer, Mamba2, Mixer, ModelGraph, NormKind, QkNorm, ScaledMlp,
    Score, ShortConv, SideBySide,
};
use monobloc::reference::{Session, argmax, forward};

use crate::support::{Goldens, checkpoints, fixture, max_difference};

/// Recomputation in another summation order differs by up to 3e-5 (tests/fixtures/README.md); the features that a
/// fixture exercises move its logits by far more than this.
const LOGITS_TOLERANCE: f32 = 3e-4;

fn greedy(imported: &Imported, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut session = Session::new(&imported.graph, &imported.weights);
    let mut ids = prompt.to_vec();
    for at in 0..prompt.len() + count - 1 {
        let logits = session.step(ids[at]);
        if at + 1 >= prompt.len() {
            ids.push(argmax(&logits));
        }
    }
    ids.split_off(prompt.len())
}

/// Compares every checkpoint of a fixture folder with its goldens; returns how many there were.
fn agree_with_transformers(folder: &str) -> usize {
    let names = checkpoints(folder);
    let mut wrong = Vec::new();
    for name in &names {
        let goldens = Goldens::open(name);
        let imported = match import(&fixture(name)) {
            Ok(imported) => imported,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        let ids = goldens.ids("input_ids");
        let logits = forward(&imported.graph, &imported.weights, &ids).concat();
        let difference = max_difference(&logits, &goldens.floats("logits"));
        let expected = goldens.ids("greedy_ids");
        let same = greedy(&imported, &ids, expected.len()) == expected;
        println!("{name}: largest difference {difference:e}, greedy ids {}", if same { "equal" } else { "differ" });
        if difference > LOGITS_TOLERANCE || !same {
            wrong.push(format!("{name}: largest difference {difference}, greedy ids equal: {same}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    names.len()
}

#[test]
fn every_family_agrees_with_transformers() {
    assert_eq!(agree_with_transformers("families"), 19);
}

#[test]
fn every_mixture_agrees_with_transformers() {
    assert_eq!(agree_with_transformers("experts"), 23);
    assert_eq!(agree_with_transformers("quantised-experts"), 3);
}

/// Absent keys, both config layouts, other rotary kinds, shards: see tests/fixtures/make_variants.py.
#[test]
fn variants_agree_with_transformers() {
    assert_eq!(agree_with_transformers("variants"), 44);
}

/// Dense families after Qwen3: other places of norms, layers without rotation, queries that grow with position.
#[test]
fn dense_families_agree_with_transformers() {
    assert_eq!(agree_with_transformers("dense"), 8);
}

/// Layers with a recurrent state, one of them in its wrapper.
#[test]
fn hybrids_agree_with_transformers() {
    assert_eq!(agree_with_transformers("hybrids"), 15);
}

/// A feature's name, and how to ignore it.
type Feature<T> = (&'static str, fn(&mut T));

/// Gives every head the gains of the first.
fn share_gains(norm: &mut Option<QkNorm>) {
    if let Some(QkNorm { weights, .. }) = norm {
        let first = weights[0];
        weights.fill(first);
    }
}

/// Features of attention, and how it computes without them.
const ATTENTION_FEATURES: [Feature<Attention>; 15] = [
    ("rotary embedding", |a| a.rope = None),
    ("window", |a| a.window = None),
    ("score softcap", |a| a.softcap = None),
    ("score scale", |a| a.scale = (a.head_dim as f32).powf(-0.5)),
    ("q norm", |a| a.q_norm = None),
    ("k norm", |a| a.k_norm = None),
    ("kind of q norm", |a| a.q_norm.iter_mut().for_each(|norm| norm.kind = NormKind::Rms)),
    ("gains of each head of k", |a| share_gains(&mut a.k_norm)),
    ("q bias", |a| a.q.bias = None),
    ("v bias", |a| a.v.bias = None),
    ("o bias", |a| a.o.bias = None),
    ("sinks", |a| a.sinks = None),
    ("output gate", |a| a.gate = None),
    ("query scale", |a| a.query_scale = None),
    ("norm after the rotation", |a| a.norm_after_rope = false),
];

/// Features of a gated delta net, and how it computes without them.
const DELTA_FEATURES: [Feature<GatedDelta>; 2] =
    [("doubled beta", |d| d.negative_eigenvalues = false), ("gains of the gated norm", |d| d.norm.weight = None)];

/// Features of a short convolution, and how it computes without them.
const CONV_FEATURES: [Feature<ShortConv>; 3] = [
    ("bias of a short convolution", |c| c.conv_bias = None),
    ("bias into a short convolution", |c| c.h.bias = None),
    ("which part of a short convolution is which", |c| std::mem::swap(&mut c.c, &mut c.h)),
];

/// Features of Mamba-2, and how it computes without them.
const MAMBA_FEATURES: [Feature<Mamba2>; 10] = [
    ("bias of the convolution", |m| m.conv_bias = None),
    ("bias into Mamba-2", |m| m.dt.bias = None),
    ("bias out of Mamba-2", |m| m.o.bias = None),
    ("gains of the gated norm of Mamba-2", |m| m.norm.iter_mut().for_each(|norm| norm.norm.weight = None)),
    ("groups of the gated norm", |m| m.norm.iter_mut().for_each(|norm| norm.groups = 1)),
    ("order of norm and gate", |m| m.norm.iter_mut().for_each(|norm| norm.before_gate ^= true)),
    ("scale into Mamba-2", |m| m.input_scale = 1.0),
    ("scales of the parts of Mamba-2", |m| m.scales = [1.0; 5]),
    ("scale out of Mamba-2", |m| m.output_scale = 1.0),
    ("which part of Mamba-2 is which", |m| std::mem::swap(&mut m.b, &mut m.c)),
];

/// Features of attention beside Mamba-2, and how it computes without them.
const BESIDE_FEATURES: [Feature<SideBySide>; 2] = [
    ("scale into attention", |s| s.attention_scales[0] = 1.0),
    ("scale out of attention", |s| s.attention_scales[1] = 1.0),
];

/// Features of an MLP with factors, and how it computes without them.
const SCALED_FEATURES: [Feature<ScaledMlp>; 2] =
    [("scale of the gate", |s| s.gate_scale = 1.0), ("scale out of the MLP", |s| s.down_scale = 1.0)];

/// Features of a layer outside of attention, and how it computes without them.
const LAYER_FEATURES: [Feature<Layer>; 6] = [
    ("squared ReLU", |l| {
        l.feed.dense_mut().into_iter().filter(|mlp| mlp.act == Act::SquaredRelu).for_each(|mlp| mlp.act = Act::Relu)
    }),
    ("up bias", |l| l.feed.dense_mut().into_iter().for_each(|mlp| mlp.up.bias = None)),
    ("down bias", |l| l.feed.dense_mut().into_iter().for_each(|mlp| mlp.down.bias = None)),
    ("norm after attention", |l| l.attn_post_norm = None),
    ("norm after the MLP", |l| l.mlp_post_norm = None),
    ("parallel branches", |l| l.parallel = false),
];

/// Features of a model outside of its layers, and how it computes without them.
const MODEL_FEATURES: [Feature<ModelGraph>; 9] = [
    ("embedding scale", |g| g.embed_scale = 1.0),
    ("logit scale", |g| g.logits_scale = 1.0),
    ("logit softcap", |g| g.logits_softcap = None),
    ("residual scale", |g| g.layers.iter_mut().for_each(|l| l.residual_scale = 1.0)),
    ("gain offset", |g| g.final_norm.weight_offset = 0.0),
    ("norm bias", |g| g.final_norm.bias = None),
    ("rotary scale", |g| g.ropes.iter_mut().for_each(|r| r.scale = 1.0)),
    ("neighbouring pairs", |g| g.ropes.iter_mut().for_each(|r| r.interleaved = false)),
    ("second rotary table", |g| g.ropes.first().cloned().into_iter().for_each(|first| g.ropes.fill(first))),
];

/// Features of a mixture of experts, and how it computes without them.
const EXPERTS_FEATURES: [Feature<Experts>; 16] = [
    ("number of slots", |e| e.router.top_k = 1),
    ("order of experts", |e| e.experts.swap(0, 1)),
    ("kind of scores", |e| {
        e.router.score = if e.router.score == Score::Softmax { Score::Sigmoid } else { Score::Softmax }
    }),
    ("correction of the choice", |e| e.router.correction = None),
    ("groups of experts", |e| e.router.groups = None),
    ("normalised weights", |e| e.router.normalise = e.router.normalise.xor(Some(0.0))),
    ("scale of weights", |e| e.router.scale = 1.0),
    ("shared expert", |e| e.shared = None),
    ("gate of the shared expert", |e| e.shared.iter_mut().for_each(|shared| shared.gate = None)),
    ("scale of the shared expert", |e| e.shared.iter_mut().for_each(|shared| shared.scale = 1.0)),
    ("rows of an expert's gate", |e| e.experts.iter_mut().for_each(|mlp| mlp.gate = Some(mlp.up.clone()))),
    ("bias of the router", |e| e.router.linear.bias = None),
    ("biases of up", |e| e.experts.iter_mut().for_each(|mlp| mlp.up.bias = None)),
    ("biases of down", |e| e.experts.iter_mut().for_each(|mlp| mlp.down.bias = None)),
    ("clamped SwiGLU", |e| e.experts.iter_mut().for_each(|mlp| mlp.swiglu = None)),
    ("activation of experts", |e| {
        e.experts.iter_mut().filter(|mlp| mlp.swiglu.is_none()).for_each(|mlp| mlp.act = Act::Relu)
    }),
];

/// Goldens prove that a feature is computed only if ignoring it changes the logits. So for each feature of each family there is
/// a checkpoint whose logits move by far more than the tolerance if the feature is ignored.
#[test]
fn ignoring_any_feature_moves_the_logits() {
    let mut most: BTreeMap<(String, &str), f32> = BTreeMap::new();
    for name in ["families", "variants", "experts", "dense", "hybrids"].into_iter().flat_map(checkpoints) {
        let imported = import(&fixture(&name)).unwrap();
        let ids = Goldens::open(&name).ids("input_ids");
        let expected = forward(&imported.graph, &imported.weights, &ids).concat();
        let mut try_without = |feature, without: ModelGraph| {
            if without != imported.graph {
                let logits = forward(&without, &imported.weights, &ids).concat();
                let moved = most.entry((imported.graph.family.clone(), feature)).or_default();
                *moved = moved.max(max_difference(&logits, &expected));
            }
        };
        for (feature, change) in ATTENTION_FEATURES {
            let mut without = imported.graph.clone();
            without.layers.iter_mut().filter_map(Layer::attention_mut).for_each(change);
            try_without(feature, without);
        }
        for (feature, change) in DELTA_FEATURES {
            let mut without = imported.graph.clone();
            let nets = without.layers.iter_mut().filter_map(|layer| match &mut layer.mixer {
                Mixer::GatedDelta(net) => Some(&mut **net),
                _ => None,
            });
            nets.for_each(change);
            try_without(feature, without);
        }
        for (feature, change) in CONV_FEATURES {
            let mut without = imported.graph.clone();
            let convs = without.layers.iter_mut().filter_map(|layer| match &mut layer.mixer {
                Mixer::ShortConv(conv) => Some(&mut **conv),
                _ => None,
            });
            convs.for_each(change);
            try_without(feature, without);
        }
        for (feature, change) in MAMBA_FEATURES {
            let mut without = imported.graph.clone();
            let mambas = without.layers.iter_mut().filter_map(|layer| match &mut layer.mixer {
                Mixer::Mamba2(mamba) => Some(&mut **mamba),
                Mixer::SideBySide(both) => Some(&mut both.mamba),
                _ => None,
            });
            mambas.for_each(change);
            try_without(feature, without);
        }
        for (feature, change) in BESIDE_FEATURES {
            let mut without = imported.graph.clone();
            for layer in &mut without.layers {
                if let Mixer::SideBySide(both) = &mut layer.mixer {
                    change(both);
                }
            }
            try_without(feature, without);
        }
        for (feature, change) in SCALED_FEATURES {
            let mut without = imported.graph.clone();
            for layer in &mut without.layers {
                if let FeedForward::Scaled(scaled) = &mut layer.feed {
                    change(scaled);
                }
            }
            try_without(feature, without);
        }
        for (feature, change) in LAYER_FEATURES {
            let mut without = imported.graph.clone();
            without.layers.iter_mut().for_each(change);
            try_without(feature, without);
        }
        for (feature, change) in EXPERTS_FEATURES {
            let mut without = imported.graph.clone();
            let experts = without.layers.iter_mut().filter_map(|layer| match &mut layer.feed {
                FeedForward::Experts(experts) => Some(&mut **experts),
                _ => None,
            });
            experts.for_each(change);
            try_without(feature, without);
        }
        for (feature, change) in MODEL_FEATURES {
            let mut without = imported.graph.clone();
            change(&mut without);
            try_without(feature, without);
        }
    }
    let unseen: Vec<_> = most.iter().filter(|(_, moved)| **moved < 10.0 * LOGITS_TOLERANCE).collect();
    assert!(unseen.is_empty(), "{unseen:#?}");
    let features = ATTENTION_FEATURES.map(|(feature, _)| feature).into_iter();
    let features = features.chain(LAYER_FEATURES.map(|(feature, _)| feature));
    let features = features.chain(DELTA_FEATURES.map(|(feature, _)| feature));
    let features = features.chain(CONV_FEATURES.map(|(feature, _)| feature));
    let features = features.chain(MAMBA_FEATURES.map(|(feature, _)| feature));
    let features = features.chain(BESIDE_FEATURES.map(|(feature, _)| feature));
    let features = features.chain(SCALED_FEATURES.map(|(feature, _)| feature));
    let features = features.chain(EXPERTS_FEATURES.map(|(feature, _)| feature));
    for feature in features.chain(MODEL_FEATURES.map(|(feature, _)| feature)) {
        assert!(most.keys().any(|(_, seen)| *seen == feature), "no checkpoint has a {feature}");
    }
    assert!(most.len() > 100, "{} features of families", most.len());
}

/// A trained model: last logits and greedy text of its prompts, and the loss of held-out text token by token.
#[test]
fn tinystories_agrees_with_transformers() {
    let goldens = Goldens::open("tinystories-llama");
    let imported = import(&fixture("tinystories-llama")).unwrap();
    let (graph, weights) = (&imported.graph, &imported.weights);
    let (last, greedy_ids) = (goldens.floats("logits_last"), goldens.ids("greedy_ids"));
    // The eighth prompt is long and close to ties; the held-out text covers long contexts.
    for prompt in 0..7 {
        let ids = goldens.ids(&format!("prompt_ids.{prompt}"));
        let logits = forward(graph, weights, &ids).pop().unwrap();
        let difference = max_difference(&logits, &last[prompt * 1024..(prompt + 1) * 1024]);
        assert!(difference < LOGITS_TOLERANCE, "prompt {prompt}: {difference}");
        // The narrowest greedy margin of the seven is 0.0013, four times the tolerance.
        let expected = &greedy_ids[prompt * 64..prompt * 64 + 32];
        assert_eq!(greedy(&imported, &ids, 32), expected, "prompt {prompt}");
    }
    let ids = goldens.ids("heldout.ids");
    let expected = goldens.floats("heldout.nll");
    let logits = forward(graph, weights, &ids);
    let difference = max_difference(&logits[..64].concat(), &goldens.floats("heldout.logits_first64"));
    assert!(difference < LOGITS_TOLERANCE, "held-out logits: {difference}");
    let nll: Vec<f32> = logits.iter().zip(&ids[1..]).map(|(logits, &next)| nll(logits, next)).collect();
    let difference = max_difference(&nll, &expected);
    assert!(difference < LOGITS_TOLERANCE, "held-out loss: {difference}");
    let perplexity = |nll: &[f32]| (nll.iter().map(|&l| f64::from(l)).sum::<f64>() / nll.len() as f64).exp();
    let (found, expected) = (perplexity(&nll), perplexity(&expected));
    assert!((found / expected - 1.0).abs() < 1e-5, "perplexity {found} against {expected}");
}

fn nll(logits: &[f32], next: u32) -> f32 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    (sum.ln() - f64::from(logits[next as usize] - max)) as f32
}
