//! Tests waves of short convolutions: that a proven plan computes its model, that a wrong one has no proof, and that the generated text does what the
//! plan says.

use std::fs;

use computed::executor::cached_by;
use monobloc::ir::op::{Op, Role};
use monobloc::model::config::{Imported, import_config_only};
use monobloc::reference::Session;
use monobloc::rows::Shape;
use monobloc::validate::Validated;
use monobloc::waves::Form;

use crate::nvrtc::nvrtc;
use crate::skipped;
use crate::support::fixture;
use crate::waves::{
    Ran, cached, every_form_computes, form_compiles, given, judge_mutants_of, kernel, proven, rows_of, run_kernel,
    slot_of, small, tokens, worst_position,
};

/// The config of a fixture with heads that tensor cores take, two layers with convolutions before one with attention, and random weights.
pub fn convolving(name: &str) -> Imported {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    if config["full_attn_idxs"].is_array() {
        config["full_attn_idxs"] = vec![2].into();
    } else {
        config["layer_types"] = vec!["conv", "conv", "full_attention"].into();
    }
    for (key, value) in [
        ("num_hidden_layers", 3),
        ("hidden_size", 128),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("max_position_embeddings", 512),
    ] {
        config[key] = value.into();
    }
    // Other names of the same.
    for (key, of) in [
        ("num_heads", "num_attention_heads"),
        ("block_dim", "hidden_size"),
        ("conv_dim", "hidden_size"),
        ("conv_dim_out", "hidden_size"),
    ] {
        if config[key].is_u64() {
            config[key] = config[of].clone();
        }
    }
    if config["moe_intermediate_size"].is_u64() {
        config["moe_intermediate_size"] = 96.into();
    }
    import_config_only(&config.to_string(), 7).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn a_proven_plan_of_convolutions_computes_its_model() {
    for (seed, name) in (0u64..).zip(["hybrids/lfm2", "hybrids/lfm2-biases", "hybrids/lfm2-moe"]) {
        // A first chunk of fewer rows than inputs are kept.
        every_form_computes(name, &convolving(name), if seed == 0 { &[1, 132, 150] } else { &[1, 36, 40] }, seed);
    }
}

#[test]
fn a_wrong_plan_of_convolutions_has_no_proof() {
    let imported = convolving("hybrids/lfm2");
    for (form, rows) in [(Form::Chunk, 256), (Form::Steps, 32)] {
        let mutants = judge_mutants_of("convolutions", &imported, &small(), form, rows, None);
        assert!(mutants > 300, "{mutants} mutants");
    }
}

/// What the convolutions of a sequence keep, layer by layer, from the bytes of the cache.
fn kept(validated: &Validated, bytes: &[u8], sequence: u32) -> Vec<Vec<f32>> {
    let schedule = validated.schedule();
    let grids = schedule.program.grids.iter().filter(|grid| matches!(grid.op, Op::Convolve(_)));
    let of = |buffer: monobloc::ir::BufferId| {
        let cols = schedule.program.buffers[buffer.index()].cols as usize;
        let first = schedule.placement[buffer.index()].unwrap() as usize + slot_of(sequence) as usize * cols * 4;
        bytes[first..first + cols * 4].chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect()
    };
    grids.map(|grid| of(grid.operand(Role::State).unwrap().buffer)).collect()
}

/// Whether states are near those of the reference.
#[track_caller]
fn near(validated: &Validated, session: &Session<'_>, bytes: &[u8], sequence: u32) {
    for (layer, found) in kept(validated, bytes, sequence).iter().enumerate() {
        let known = session.inputs(layer).expect("a convolution").by_channel();
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v * v)).sum::<f64>().sqrt();
        let error = norm(&mut known.iter().zip(found).map(|(k, f)| k - f)) / norm(&mut known.iter().copied());
        assert!(error < 0.03, "layer {layer}: {error:e}");
    }
}

/// The generated text, its tables and the pack, run block by block: chunks, and steps with runs of rows of two texts. Memory of states is not a number
/// before the first launch.
#[test]
fn a_generated_kernel_of_convolutions_computes_its_model() {
    let (imported, target) = (convolving("hybrids/lfm2"), small());
    let validated = kernel(&imported.graph, &target);
    let shape = Shape::of(&validated.schedule().program).unwrap();
    let blocks = shape.blocks();
    let pages: Vec<u32> = (0..2 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
    let texts = [tokens(&imported, 150), tokens(&imported, 13)[9..].to_vec()];
    let rows = |sequence: usize, from: usize, to: usize| {
        rows_of(sequence as u32, from as u32, &given(&texts[sequence][from..to]))
    };
    let chunks = vec![(rows(0, 0, 1), 1), (rows(0, 1, 140), 1), (rows(0, 140, 150), 1)];
    let steps = vec![
        ([rows(0, 0, 6), rows(1, 0, 1)].concat(), 1),
        ([rows(1, 1, 4), rows(0, 6, 20)].concat(), 1),
        (rows(0, 20, 40), 1),
    ];
    for (form, launches, lengths) in [(Form::Chunk, chunks, vec![150]), (Form::Steps, steps, vec![40, 4])] {
        let proven = proven(&validated, &target, form, if form == Form::Chunk { 256 } else { 32 }).unwrap();
        let Some(Ran { cache, .. }) = run_kernel(&imported, &proven, &launches, &pages) else {
            return skipped("a_generated_kernel_of_convolutions_computes_its_model", "C++ compiler", "`c++`");
        };
        for (sequence, count) in lengths.into_iter().enumerate() {
            let mut session = Session::new(&imported.graph, &imported.weights);
            texts[sequence][..count].iter().for_each(|&token| drop(session.step_hidden(token)));
            let own = &pages[sequence * blocks as usize..][..blocks as usize];
            let known: Vec<_> = cached_by(&session, &imported.graph).into_iter().take(1).collect();
            let error = worst_position(&known, &cached(validated.schedule(), &cache, own, count));
            assert!(error < 0.03, "{form:?}, text {sequence}: {error:e}");
            near(&validated, &session, &cache, sequence as u32);
        }
    }
}

#[test]
fn wave_kernels_of_convolutions_compile() {
    let nvrtc = nvrtc("wave_kernels_of_convolutions_compile");
    let (imported, target) = (convolving("hybrids/lfm2-biases"), small());
    let validated = kernel(&imported.graph, &target);
    for of in [(Form::Chunk, 256), (Form::Steps, 64)] {
        form_compiles(nvrtc, &validated, &target, of, &["WaveShortConv"]);
    }
}
