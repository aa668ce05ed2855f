//! Tests a cache in fp8: no key or value is beyond its scale, codes do not depend on the order, and the loss of quality.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Arithmetic, Input, Interp, Options, Order};
use monobloc::ir::layout::placed_bytes;
use monobloc::ir::program::Space;
use monobloc::ir::schedule::Schedule;
use monobloc::model::cache_scales::cache_scales;
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::pack::pack;
use monobloc::reference::Session;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::cli_support::{Place, manifest_text};
use crate::formats::{place_with, run};
use crate::support::{Goldens, checkpoints, fixture};

const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const CACHE_ALONE: Precision = Precision { cache: DType::E4m3, ..FP32 };

/// Models with windows, two RoPE tables, norms of q and k over heads and projections, biases, LayerNorm, a parallel block.
const VARIED: [&str; 6] = ["gemma2", "gemma3", "gpt-neox", "olmo2", "qwen3", "llama-bias"];

fn family(name: &str) -> Imported {
    import(&fixture(&format!("families/{name}"))).unwrap()
}

fn ids_of(name: &str) -> Vec<u32> {
    Goldens::open(&format!("families/{name}")).ids("input_ids")
}

fn place(imported: &Imported, precision: Precision, context_max: u32, splits: u32) -> Schedule {
    place_with(imported, precision, context_max, |candidate| (candidate.splits, candidate.split_from) = (splits, 6))
}

fn referred(imported: &Imported, cache: DType, ids: &[u32]) -> Vec<f32> {
    let mut session = Session::with_cache(&imported.graph, &imported.weights, cache);
    ids.iter().flat_map(|&id| session.step(id)).collect()
}

/// Norm of the difference divided by the norm of the expected values.
fn relative(expected: &[f32], found: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = square(&mut expected.iter().zip(found).map(|(e, f)| e - f));
    (difference / square(&mut expected.iter().copied())).sqrt()
}

#[test]
fn scales_that_follow_from_weights_hold_every_key_and_value() {
    for name in checkpoints("families") {
        let imported = import(&fixture(&name)).unwrap();
        let mut session = Session::new(&imported.graph, &imported.weights);
        Goldens::open(&name).ids("input_ids").into_iter().for_each(|id| drop(session.step_hidden(id)));
        for (l, layer) in imported.graph.layers.iter().enumerate() {
            let scales = cache_scales(&imported.graph, &imported.weights, l);
            assert_eq!(scales.len(), layer.attention().unwrap().kv_heads as usize);
            let dim = layer.attention().unwrap().head_dim as usize;
            for (kind, rows) in session.cached(l).into_iter().enumerate() {
                for (head, scale) in scales.iter().map(|scales| f64::from(scales[kind])).enumerate() {
                    let of_head = rows.iter().flat_map(|row| &row[head * dim..(head + 1) * dim]);
                    let most = of_head.fold(0.0, |most: f64, x| most.max(x.abs())) / scale;
                    let at = format!("{name}, layer {l}, head {head}, {kind}: {most} units of {scale}");
                    assert!(most <= 448.0, "{at}");
                    assert_eq!(scale.log2().fract(), 0.0, "{at}");
                    // Codes below 2^-6 have fewer bits: the largest value is far above them.
                    assert!(most >= 1.0 || scale == 1.0, "{at}");
                }
            }
        }
    }
}

#[test]
fn schedules_agree_with_the_reference_with_such_a_cache_in_any_order() {
    for name in VARIED {
        let (imported, ids) = (family(name), ids_of(name));
        let ids = &ids[..12];
        let (exact, expected) = (referred(&imported, DType::F32, ids), referred(&imported, DType::E4m3, ids));
        let cost = relative(&exact, &expected);
        assert!((1e-3..0.1).contains(&cost), "{name}: rounding costs {cost}");
        for splits in [1, 3] {
            let schedule = place(&imported, CACHE_ALONE, 32, splits);
            let fast = run(&imported, &schedule, Options::fast(), ids);
            let spec = run(&imported, &schedule, Options::spec(), ids);
            // A code may fall on the other side of its tie.
            for found in [relative(&expected, &spec), relative(&expected, &fast)] {
                assert!(found < 5e-3 && found < cost / 4.0, "{name}: {found}, rounding costs {cost}");
            }
            let threads = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(3) };
            for options in [threads, Options::adversarial(Arithmetic::Fast, 5)] {
                assert!(run(&imported, &schedule, options, ids) == fast, "{name}: other bits");
            }
        }
    }
}

#[test]
fn deep_positions_run_on_a_generated_cache() {
    let imported = family("mistral-swa");
    let schedule = place(&imported, CACHE_ALONE, 128, 3);
    let pack = Arc::new(pack(&schedule, &imported.graph, &imported.weights).unwrap());
    let run = |options, position| {
        let mut interp = Interp::new(&schedule, pack.clone(), options).unwrap();
        interp.fill_cache(5, position).unwrap();
        [interp.step(Input::Token(7)).unwrap(), interp.step(Input::Selected).unwrap()].concat()
    };
    let shallow = run(Options::fast(), 3);
    for position in [19, 90, 126] {
        let (fast, spec) = (run(Options::fast(), position), run(Options::spec(), position));
        assert!(fast == run(Options::adversarial(Arithmetic::Fast, 3), position), "position {position}");
        assert!(relative(&spec, &fast) < 5e-3, "position {position}");
        assert!(relative(&shallow, &fast) > 0.01, "the cache has no effect at {position}");
    }
}

#[test]
fn a_cache_takes_half_the_bytes_of_bf16() {
    let imported = import(&fixture("tinystories-llama")).unwrap();
    let bytes = |cache| -> u64 {
        let program = place(&imported, Precision { cache, ..FP32 }, 64, 1).program;
        program.buffers.iter().filter(|buffer| buffer.space == Space::Cache).map(placed_bytes).sum()
    };
    assert!(bytes(DType::E4m3) > 0);
    assert_eq!(2 * bytes(DType::E4m3), bytes(DType::Bf16));
}

#[test]
fn heads_of_ten_dimensions_begin_where_a_copy_may() {
    let imported = import_config_only(crate::formats::ODD, 3).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 61).collect();
    let schedule = place(&imported, CACHE_ALONE, 64, 2);
    let caches: Vec<_> = schedule.program.buffers.iter().filter(|b| b.space == Space::Cache).collect();
    assert_eq!(caches.len(), 4);
    assert!(caches.iter().all(|cache| (cache.dtype, cache.cols) == (DType::E4m3, 5 * 16)), "{caches:?}");
    let expected = referred(&imported, DType::E4m3, &ids);
    let fast = run(&imported, &schedule, Options::fast(), &ids);
    assert!(relative(&expected, &fast) < 5e-3, "{}", relative(&expected, &fast));
    assert!(run(&imported, &schedule, Options::adversarial(Arithmetic::Fast, 5), &ids) == fast);
}

/// A checkpoint of fp8 weights with scales for its cache: `keys` and `values` in every layer, of rank 1 or 0.
fn with_scales(keys: f32, values: f32, rank: usize, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let source = fixture("quantised/ct-fp8-static");
    let folder = tempfile::tempdir().unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    config["quantization_config"]["kv_cache_scheme"] = json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor", "symmetric": true, "type": "float",
    });
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    change(&mut config);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(source.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut views: BTreeMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
    let scales = [keys.to_le_bytes(), values.to_le_bytes()];
    for layer in 0..layers {
        for (name, scale) in ["k_scale", "v_scale"].iter().zip(&scales) {
            let view = TensorView::new(Dtype::F32, vec![1; rank], scale).unwrap();
            views.insert(format!("model.layers.{layer}.self_attn.{name}"), view);
        }
    }
    fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    folder
}

fn logits(folder: &Path, precision: Precision) -> Vec<f32> {
    let imported = import(folder).unwrap();
    let ids: Vec<u32> = (1..9).collect();
    run(&imported, &place(&imported, precision, 16, 1), Options::fast(), &ids)
}

#[test]
fn scales_of_a_checkpoint_are_used_and_nothing_else_is_taken_for_them() {
    let plain = logits(&fixture("quantised/ct-fp8-static"), FP32);
    let [ordinary, of_rank_0, coarse_keys, coarse_values] =
        [(0.05, 0.06, 1), (0.05, 0.06, 0), (100.0, 0.06, 1), (0.05, 100.0, 1)].map(|(keys, values, rank)| {
            let folder = with_scales(keys, values, rank, |_| ());
            let imported = import(folder.path()).unwrap();
            assert_eq!(cache_scales(&imported.graph, &imported.weights, 1)[0], [keys, values]);
            assert!(imported.notes.iter().any(|note| note.contains("`cache = \"fp8\"`")), "{:?}", imported.notes);
            // A cache of another type has no scales.
            assert!(logits(folder.path(), FP32) == plain);
            logits(folder.path(), CACHE_ALONE)
        });
    assert!(ordinary == of_rank_0);
    let cost = relative(&plain, &ordinary);
    assert!((1e-4..0.1).contains(&cost), "{cost}");
    for coarse in [coarse_keys, coarse_values] {
        let moved = relative(&ordinary, &coarse);
        assert!(moved > 0.01, "{moved}");
    }
    let folder = with_scales(0.0, 0.02, 1, |_| ());
    let imported = import(folder.path()).unwrap();
    let refused = pack(&place(&imported, CACHE_ALONE, 16, 1), &imported.graph, &imported.weights).unwrap_err();
    assert!(refused.to_string().contains("has the scale 0 for cached keys or values"), "{refused}");
    for (key, value, expected) in [
        ("num_bits", json!(4), "`quantization_config.kv_cache_scheme.num_bits`: expected 8"),
        ("type", json!("int"), "`quantization_config.kv_cache_scheme.type`: expected float"),
        ("strategy", json!("attn_head"), "`quantization_config.kv_cache_scheme.strategy`: expected tensor"),
        ("dynamic", json!(true), "kv_cache_scheme.dynamic`"),
        ("zero_point", json!(true), "kv_cache_scheme.zero_point`"),
    ] {
        let set = |config: &mut Value| config["quantization_config"]["kv_cache_scheme"][key] = value;
        let refused = import(with_scales(0.01, 0.01, 1, set).path()).unwrap_err().to_string();
        assert!(refused.contains(expected), "{key}: {refused}");
    }
    // Without a scheme in the config, the scales are left out, whatever they are.
    let none = |config: &mut Value| config["quantization_config"]["kv_cache_scheme"] = Value::Null;
    let folder = with_scales(100.0, 100.0, 1, none);
    let notes = import(folder.path()).unwrap().notes.join("; ");
    assert!(notes.contains("scales of cached keys and values have no scheme in the config"), "{notes}");
    assert!(logits(folder.path(), CACHE_ALONE) == logits(&fixture("quantised/ct-fp8-static"), CACHE_ALONE));
}

/// Perplexity may differ by this much from that of a cache in fp32 (docs/formats.md).
const PERPLEXITY_MAX: f64 = 0.005;

#[test]
fn a_manifest_asks_for_it_and_perplexity_stays() {
    let place = Place::new();
    let plain = manifest_text(&format!("path:{}", fixture("tinystories-llama").display()), 256);
    place.write("plain.toml", &plain);
    place.write("m.toml", plain.replace("weights = \"fp32\"", "weights = \"fp32\"\ncache = \"fp8\""));
    let text = fs::read_to_string(fixture("tinystories-llama/heldout.txt")).unwrap();
    place.write("short.txt", &text[..1500]);
    let score = |manifest: &str| place.run(&format!("perplexity {manifest} short.txt --json")).code(0).json();
    let (exact, rounded) = (score("plain.toml"), score("m.toml"));
    let ratio = rounded["ppl"].as_f64().unwrap() / exact["ppl"].as_f64().unwrap();
    assert!(ratio != 1.0 && (ratio - 1.0).abs() <= PERPLEXITY_MAX, "{exact} {rounded}");
    let program = place.run("show program m.toml").code(0).stdout;
    assert!(program.contains("cache=fp8"), "{program}");
    // Runs what was built; nothing is built for another type.
    let told = place.run("generate m.toml --ids 1,2,3 --max-tokens 8").code(0).stdout;
    place.run("export m.toml --out moved").code(0);
    assert_eq!(place.run("generate moved --ids 1,2,3 --max-tokens 8").code(0).stdout, told);
}

#[test]
fn names_of_types_are_told_apart() {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture("tinystories-llama").display()), 64);
    for (line, expected) in [
        ("cache = \"e4m3\"", "expected `fp32`, `bf16` or `fp8`, found `e4m3`"),
        ("activations = \"fp8\"", "expected `fp32` or `bf16`, found `fp8`"),
    ] {
        place.write("m.toml", text.replace("weights = \"fp32\"", &format!("weights = \"fp32\"\n{line}")));
        place.run("build m.toml").refused(&[expected]);
    }
}

/// Codes of two right computations in bf16 differ. Builds and searches on `cpu` compare them all the same, of whole steps and of one op.
#[test]
fn builds_and_searches_check_the_codes_of_the_interpreter() {
    let place = Place::new();
    let text = manifest_text(&format!("path:{}", fixture("families/llama-gqa").display()), 64);
    place.write("m.toml", text.replace("weights = \"fp32\"", "weights = \"bf16\"\ncache = \"fp8\""));
    place.run("build m.toml").code(0);
    place.run("tune m.toml --max-trials 2").code(0);
    place.run("tune-op m.toml attention --max-trials 1").code(0);
    let stats = place.run("flywheel stats --own --json").code(0).json();
    let verdicts = stats["verdicts"].as_object().unwrap();
    assert_eq!(verdicts.keys().collect::<Vec<_>>(), ["ok"], "{stats}");
    assert!(verdicts["ok"].as_u64().unwrap() >= 5, "{stats}");
}
