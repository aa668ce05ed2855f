//! Tests matrices of codes: checkpoints of the libraries that own the formats, and weights rounded here, through lowering, proof
//! and interpreter.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::format::{Code, Format, FormatPlan, NAMED, ScaleCode};
use monobloc::interp::{Arithmetic, Interp, Options, Order};
use monobloc::ir::GridId;
use monobloc::ir::layout::{matrices, pack_bytes};
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::program::{Buffer, Content, Grid, LayerOp, Space};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::variant::{MatVecVariant, Variant};
use monobloc::lower::lower;
use monobloc::model::coded::CodedRow;
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::model::graph::{Linear, Mlp, TensorId};
use monobloc::model::rounding::{round_matrices, round_row};
use monobloc::pack::{pack, pack_pieces};
use monobloc::reference;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Rule, check, validate};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::support::{Goldens, checkpoints, fixture, max_difference};

/// As for other checkpoints: fp32 against fp32 in another order (tests/fixtures/README.md).
const LOGITS_TOLERANCE: f32 = 3e-4;
const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

fn place(imported: &Imported, precision: Precision, context_max: u32) -> Schedule {
    place_with(imported, precision, context_max, |_| ())
}

/// A proven schedule on a few workers that survives printing and parsing. `turn` changes knobs of the default candidate.
pub fn place_with(
    imported: &Imported,
    precision: Precision,
    context_max: u32,
    turn: impl FnOnce(&mut Candidate),
) -> Schedule {
    let target = Target::builtin("cpu").unwrap();
    let mut candidate = Candidate::default_for(&imported.graph, &target, precision).for_context(context_max);
    turn(&mut candidate);
    let program = lower(&imported.graph, "test", precision, context_max, &candidate).unwrap();
    let schedule = schedule(program, &target, &candidate).unwrap();
    if let Err(refused) = validate(schedule.clone(), &target) {
        panic!("{refused:?}");
    }
    assert!(parse(&print(&schedule)).unwrap() == schedule, "its text gives another schedule");
    schedule
}

/// Logits after each of `ids`.
pub fn run(imported: &Imported, schedule: &Schedule, options: Options, ids: &[u32]) -> Vec<f32> {
    let pack = Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap());
    Interp::new(schedule, pack, options).unwrap().logits(ids).unwrap().concat()
}

/// With its weights rounded by `plan`.
pub fn rounded(mut imported: Imported, plan: &FormatPlan) -> Imported {
    round_matrices(&mut imported.graph, &mut imported.weights, plan).unwrap();
    imported
}

/// The format that a manifest calls `name`.
pub fn named(name: &str) -> Format {
    NAMED.into_iter().find(|(found, _)| *found == name).map(|(_, format)| format).expect("a format")
}

/// One format for all matrices.
pub fn all(format: Format) -> FormatPlan {
    FormatPlan { weights: Some(format), ..FormatPlan::default() }
}

#[test]
fn checkpoints_of_codes_agree_with_the_libraries_that_own_them() {
    let names = checkpoints("quantised");
    assert_eq!(names.len(), 17);
    for name in &names {
        let imported = import(&fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!imported.graph.formats.is_empty(), "{name}");
        let goldens = Goldens::open(name);
        for (id, tensor) in (0..).map(TensorId).zip(&imported.graph.tensors) {
            let golden = format!("dequant.{}", tensor.name);
            if !goldens.names().contains(&golden) {
                continue;
            }
            let found = imported.weights.vector_f32(id);
            assert!(
                found == goldens.floats(&golden),
                "{name}: {golden}: {}",
                max_difference(&found, &goldens.floats(&golden))
            );
        }
        let (ids, want) = (goldens.ids("input_ids"), goldens.floats("logits"));
        let reference = reference::forward(&imported.graph, &imported.weights, &ids).concat();
        let difference = max_difference(&reference, &want);
        assert!(difference < LOGITS_TOLERANCE, "{name}: the reference differs by {difference}");
        let schedule = place(&imported, FP32, ids.len() as u32);
        let logits = run(&imported, &schedule, Options::fast(), &ids);
        let difference = max_difference(&logits, &want);
        assert!(difference < LOGITS_TOLERANCE, "{name}: the schedule differs by {difference}");
    }
}

/// Experts are read as other matrices are: the values of those that the goldens have, and the logits.
#[test]
fn experts_of_codes_agree_with_the_libraries_that_own_them() {
    for name in checkpoints("quantised-experts") {
        let imported = import(&fixture(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let goldens = Goldens::open(&name);
        let mut seen = 0;
        for (id, tensor) in (0..).map(TensorId).zip(&imported.graph.tensors) {
            let golden = format!("dequant.{}", tensor.name);
            if !goldens.names().contains(&golden) {
                continue;
            }
            let (mut found, expected) = (imported.weights.vector_f32(id), goldens.floats(&golden));
            if let [_, rows, cols] = *tensor.shape.as_slice() {
                // Of stacked experts the goldens have the first one, transposed as the library has it.
                let place = |at: u32| ((at % rows) * cols + at / rows) as usize;
                found = (0..rows * cols).map(|at| found[place(at)]).collect();
            }
            assert!(found == expected, "{name}: {golden}: {}", max_difference(&found, &expected));
            seen += 1;
        }
        assert!(seen > 0, "{name}: no goldens of values");
        // Routers stay as they are, and every expert is stored as codes.
        for layer in &imported.graph.layers {
            let experts = layer.feed.experts().unwrap();
            let coded = |linear: &Linear| imported.graph.formats.contains_key(&linear.weight.tensor);
            assert!(
                !coded(&experts.router.linear) && experts.experts.iter().flat_map(Mlp::linears).all(coded),
                "{name}"
            );
        }
    }
}

/// A router that the files have as values is one of values, though a method does not name it (GPTQ).
#[test]
fn a_router_of_values_needs_no_name() {
    let name = "quantised-experts/mixtral-ct-fp8";
    let folder = edited(name, |_, _| ());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["quantization_config"]["ignore"] = json!(["lm_head"]);
    fs::write(&path, config.to_string()).unwrap();
    let graphs = [fixture(name), folder.path().to_path_buf()].map(|place| import(&place).unwrap().graph);
    assert!(graphs[0] == graphs[1]);
}

/// A precision rounds experts as other matrices, or apart, and leaves what chooses them.
#[test]
fn experts_are_rounded_and_routers_are_not() {
    let (int8, mxfp4) = (named("int8"), named("mxfp4"));
    let of = |plan: &FormatPlan| {
        let graph = rounded(import(&fixture("experts/qwen2-moe-shared")).unwrap(), plan).graph;
        let format = |linear: &Linear| graph.formats.get(&linear.weight.tensor).copied();
        let layer = &graph.layers[1];
        let experts = layer.feed.experts().unwrap();
        let shared = experts.shared.as_ref().unwrap();
        let own: Vec<_> = experts.experts.iter().flat_map(Mlp::linears).map(format).collect();
        assert!(own.iter().all(|one| *one == own[0]));
        let plain = [&experts.router.linear, shared.gate.as_ref().unwrap()].map(format);
        assert_eq!(plain, [None, None]);
        [format(layer.mixer.linears()[0]), format(&shared.mlp.up), own[0]]
    };
    assert_eq!(of(&all(int8)), [Some(int8); 3]);
    let apart = FormatPlan { experts: Some(mxfp4), ..FormatPlan::default() };
    assert_eq!(of(&apart), [None, None, Some(mxfp4)]);
    let but_experts = FormatPlan { experts: Some(Format::plain(DType::Bf16)), ..all(int8) };
    assert_eq!(of(&but_experts), [Some(int8), Some(int8), None]);
    let layer = FormatPlan { layers: BTreeMap::from([(1, int8)]), ..apart };
    assert_eq!(of(&layer), [Some(int8); 3]);
}

/// A folder with a checkpoint whose tensors `edit` may change.
fn edited(name: &str, edit: impl Fn(&str, &mut Vec<u8>)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixture(name).join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut owned: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for (tensor, view) in tensors.tensors() {
        let mut data = view.data().to_vec();
        edit(&tensor, &mut data);
        owned.insert(tensor, data);
    }
    let views = tensors.tensors().into_iter().map(|(tensor, view)| {
        let data = owned[&tensor].as_slice();
        (tensor, safetensors::tensor::TensorView::new(view.dtype(), view.shape().to_vec(), data).unwrap())
    });
    let views: Vec<_> = views.collect();
    let whole = safetensors::serialize(views, None).unwrap();
    fs::write(folder.path().join("model.safetensors"), whole).unwrap();
    folder
}

/// Logits of a checkpoint, or nothing if it is refused.
fn logits(folder: &Path, ids: &[u32]) -> Option<Vec<f32>> {
    let imported = import(folder).ok()?;
    let schedule = place(&imported, FP32, ids.len() as u32);
    let pack = Arc::new(pack(&schedule, &imported.graph, &imported.weights).ok()?);
    Some(Interp::new(&schedule, pack, Options::fast()).unwrap().logits(ids).unwrap().concat())
}

/// An importer could ignore a part, or read it in another way. So each part of the first layer's `down_proj` must change the logits.
#[test]
fn every_part_of_a_matrix_of_codes_matters() {
    // Swaps the halves of bytes, the bytes of words, or the groups of columns.
    let turned = |part: &str, data: &mut Vec<u8>| match part {
        "qzeros" | "weight_zero_point" => data.iter_mut().for_each(|b| *b ^= 0x33),
        "qweight" | "weight_packed" => data.iter_mut().for_each(|b| *b = b.rotate_left(4)),
        "g_idx" | "weight_g_idx" => data.rotate_left(4 * 64),
        _ => {
            // Swaps the scales of two rows, groups or blocks; doubles a single scale.
            let half = data.len() / 2;
            if data.len() > 4 { data.rotate_left(half) } else { data.iter_mut().for_each(|b| *b ^= 1) }
        }
    };
    let mut tried = 0;
    for name in checkpoints("quantised") {
        let ids = Goldens::open(&name).ids("input_ids");
        let want = logits(&fixture(&name), &ids[..6]).unwrap();
        let file = fs::read(fixture(&name).join("model.safetensors")).unwrap();
        let first = "model.layers.0.mlp.down_proj.";
        let parts: Vec<String> = SafeTensors::deserialize(&file)
            .unwrap()
            .names()
            .iter()
            .filter_map(|n| n.strip_prefix(first))
            .map(str::to_string)
            .collect();
        for part in parts {
            if matches!(part.as_str(), "input_scale" | "input_global_scale" | "weight_shape" | "bias") {
                continue; // Of activations, which are not quantised; and a copy of what the config says.
            }
            let folder = edited(&name, |tensor, data| {
                if tensor.strip_prefix(first) == Some(part.as_str()) {
                    turned(&part, data);
                }
            });
            let found = logits(folder.path(), &ids[..6]);
            let moved = found.map_or(f32::INFINITY, |found| max_difference(&found, &want));
            assert!(moved > 100.0 * LOGITS_TOLERANCE, "{name}: {part} moves the logits by {moved}");
            tried += 1;
        }
    }
    assert!(tried > 40, "{tried}");
}

/// Why a checkpoint with another `quantization_config` is refused.
fn refused(name: &str, edit: impl Fn(&mut Value)) -> String {
    let folder = edited(name, |_, _| ());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config["quantization_config"]);
    fs::write(&path, config.to_string()).unwrap();
    import(folder.path()).expect_err("a config that is refused").to_string()
}

#[test]
fn what_is_not_modelled_is_refused_by_name() {
    let set = |key: &'static str, value: Value| move |config: &mut Value| config[key] = value.clone();
    for (name, edit, why) in [
        (
            "gptq-v2-asym",
            Box::new(set("bits", json!(3))) as Box<dyn Fn(&mut Value)>,
            "`quantization_config.bits`: expected 4 or 8",
        ),
        (
            "gptq-v2-asym",
            Box::new(set("checkpoint_format", json!("gptq_p"))),
            "expected gptq or gptq_v2, found \"gptq_p\"",
        ),
        (
            "gptq-v2-asym",
            Box::new(set("dynamic", json!({"+:.*": {}}))),
            "`quantization_config.dynamic`: expected nothing",
        ),
        ("gptq-v2-asym", Box::new(set("nonsense", json!(1))), "key `quantization_config.nonsense` is unknown"),
        (
            "gptq-v2-asym",
            Box::new(set("group_size", json!(64))),
            "tensor `model.layers.0.self_attn.q_proj.qzeros`: expected shape [2, 16]",
        ),
        (
            "gptq-v2-asym",
            Box::new(set("quant_method", json!("bitsandbytes"))),
            "bitsandbytes is not supported: take the checkpoint",
        ),
        ("gptq-v2-asym", Box::new(set("quant_method", json!("mxfp4"))), "key `quantization_config.bits` is unknown"),
        (
            "gptq-v2-asym",
            Box::new(set("quant_method", json!("hqq"))),
            "method `hqq` is not supported: expected compressed-tensors",
        ),
        ("awq-g64-qwen2", Box::new(set("version", json!("gemv"))), "`quantization_config.version`: expected gemm"),
        (
            "fp8-block-ragged",
            Box::new(set("weight_block_size", json!([64, 128]))),
            "expected shape [3, 2], found [2, 2]",
        ),
        ("ct-mixed", Box::new(set("kv_cache_scheme", json!({"num_bits": 8}))), "kv_cache_scheme.type`: expected float"),
        (
            "ct-mixed",
            Box::new(set("ignore", json!(["lm_head"]))),
            "tensor `model.layers.1.mlp.down_proj.weight_packed` [128, 24] is missing",
        ),
        ("modelopt-nvfp4", Box::new(set("quant_algo", json!("W4A8"))), "quant_algo`: expected NVFP4"),
    ] {
        let found = refused(&format!("quantised/{name}"), edit);
        assert!(found.contains(why), "{name}: {found}");
    }
    // A group that does not follow from the config is found when weights are read.
    let shuffled = edited("quantised/gptq-v2-asym", |tensor, data| {
        if tensor.ends_with("0.mlp.down_proj.g_idx") {
            data.rotate_left(128);
        }
    });
    let imported = import(shuffled.path()).unwrap();
    let schedule = place(&imported, FP32, 4);
    let found = pack(&schedule, &imported.graph, &imported.weights).unwrap_err().to_string();
    assert!(
        found.contains(
            "0.mlp.down_proj.g_idx` puts column 0 in group 1, but the config says that groups follow each other"
        ),
        "{found}"
    );
}

/// The checkpoint of `mxfp4` under the names and with the config that ModelOpt gives the same bytes.
fn mxfp4_of_modelopt(quantised: serde_json::Value, edit: impl Fn(&str, &mut Vec<u8>)) -> tempfile::TempDir {
    let folder = edited("quantised/mxfp4", edit);
    let place = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&place).unwrap()).unwrap();
    config["quantization_config"] = quantised;
    fs::write(&place, config.to_string()).unwrap();
    let place = folder.path().join("model.safetensors");
    let bytes = fs::read(&place).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let renamed = tensors.tensors().into_iter().map(|(name, view)| (name.replace("weight_packed", "weight"), view));
    let whole = safetensors::serialize(renamed.collect::<Vec<_>>(), None).unwrap();
    fs::write(&place, whole).unwrap();
    folder
}

/// These bytes are not from ModelOpt, but it has the same layout. No checkpoint from ModelOpt is small enough to keep here.
#[test]
fn mxfp4_of_modelopt_is_that_of_compressed_tensors_under_other_names() {
    let config = |algo: &str| {
        json!({ "quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], "kv_cache_scheme": null,
                "producer": { "name": "modelopt", "version": "0.47.0" } })
    };
    let goldens = Goldens::open("quantised/mxfp4");
    let (ids, want) = (goldens.ids("input_ids"), goldens.floats("logits"));
    let plain = |_: &str, _: &mut Vec<u8>| {};
    for (algo, note) in [("mxfp4", "fp4 (dynamic), unless"), ("W4A8_MXFP4_FP8", "fp8 (static)")] {
        let folder = mxfp4_of_modelopt(config(algo), plain);
        let found = logits(folder.path(), &ids).expect(algo);
        assert!(max_difference(&found, &want) < LOGITS_TOLERANCE, "{algo}");
        let notes = import(folder.path()).unwrap().notes;
        assert!(notes.iter().any(|found| found.contains(note)), "{algo}: {notes:?}");
    }
    // Swapped nibbles, and scales of other groups.
    for part in ["0.mlp.down_proj.weight_packed", "0.mlp.down_proj.weight_scale"] {
        let turned = |tensor: &str, data: &mut Vec<u8>| match tensor.ends_with(part) {
            true if part.ends_with("scale") => data.rotate_left(1),
            true => data.iter_mut().for_each(|byte| *byte = byte.rotate_left(4)),
            false => {}
        };
        let found = logits(mxfp4_of_modelopt(config("mxfp4"), turned).path(), &ids).expect(part);
        assert!(max_difference(&found, &want) > 1e-3, "{part}");
    }
    let groups = |size: u32| {
        let mut config = config("W4A8_MXFP4_FP8");
        let weights = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": size });
        config["config_groups"] = json!({ "group_0": { "targets": ["Linear"], "weights": weights } });
        config
    };
    assert!(import(mxfp4_of_modelopt(groups(32), plain).path()).is_ok());
    let without_groups = {
        let mut config = config("NVFP4");
        config["group_size"] = json!(16);
        config
    };
    for (config, why) in [
        (groups(16), "weights`: expected floats of 4 bits in groups of 32"),
        (config("MXFP8"), "quant_algo`: expected NVFP4, W4A16_NVFP4, mxfp4, W4A8_MXFP4_FP8, FP8 or"),
        (without_groups, "config_groups`: expected an object of groups"),
    ] {
        let refused = import(mxfp4_of_modelopt(config, plain).path()).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

/// Why a checkpoint's weights are refused when they are packed.
fn refused_by_pack(folder: &Path) -> String {
    let imported = import(folder).unwrap();
    let schedule = place(&imported, FP32, 4);
    pack(&schedule, &imported.graph, &imported.weights).expect_err("weights that are refused").to_string()
}

/// The indices of groups in a tensor that ends like this, replaced column by column.
fn with_groups(name: &str, ending: &'static str, group: impl Fn(usize) -> i32) -> tempfile::TempDir {
    edited(name, |tensor, data| {
        if tensor.ends_with(ending) {
            data.chunks_exact_mut(4).enumerate().for_each(|(k, bytes)| bytes.copy_from_slice(&group(k).to_le_bytes()));
        }
    })
}

#[test]
fn groups_that_do_not_exist_are_refused_by_tensor() {
    for (name, ending, group) in [
        ("gptq-actorder-g64", "0.mlp.down_proj.g_idx", 99),
        ("gptq-actorder-g64", "1.self_attn.q_proj.g_idx", -1),
        ("gptq-v1-asym", "0.mlp.down_proj.g_idx", 3),
        ("ct-int4-actorder", "0.mlp.down_proj.weight_g_idx", 3),
        ("ct-int4-actorder", "0.mlp.down_proj.weight_g_idx", -2),
    ] {
        let folder =
            with_groups(&format!("quantised/{name}"), ending, |k| if k == 5 { group } else { (k / 64) as i32 });
        let found = refused_by_pack(folder.path());
        assert!(found.contains(&format!("{ending}` puts column 5 in group {group}, ")), "{name}: {found}");
    }
}

#[test]
fn minus_one_means_no_order_in_compressed_tensors() {
    let name = "quantised/ct-int4-actorder";
    let ids = Goldens::open(name).ids("input_ids");
    let of = |group: fn(usize) -> i32| logits(with_groups(name, "weight_g_idx", group).path(), &ids).unwrap();
    let in_order = of(|k| (k / 64) as i32);
    assert!(of(|_| -1) == in_order && of(|k| if k == 7 { -1 } else { 1 }) == in_order);
    assert!(logits(&fixture(name), &ids).unwrap() != in_order);
}

/// A checkpoint whose `quantization_config` is changed, and each byte of its zero points.
fn with_zeros(name: &str, change: impl Fn(&mut Value), zeros: impl Fn(u8) -> u8) -> tempfile::TempDir {
    let folder = edited(&format!("quantised/{name}"), |tensor, data| {
        if tensor.ends_with(".qzeros") {
            data.iter_mut().for_each(|byte| *byte = zeros(*byte));
        }
    });
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config["quantization_config"]);
    fs::write(&path, config.to_string()).unwrap();
    folder
}

#[test]
fn zero_points_have_to_be_what_sym_says() {
    let symmetric = with_zeros("gptq-v1-asym", |config| config["sym"] = json!(true), |byte| byte);
    let found = refused_by_pack(symmetric.path());
    assert!(found.contains(".qzeros` has the zero point ") && found.contains("`sym: true`, which means 8"), "{found}");
    // Stored as in v2 under the name of v1, and the reverse: off by one.
    let other = with_zeros("gptq-8bit", |config| config["checkpoint_format"] = json!("gptq_v2"), |byte| byte);
    let found = refused_by_pack(other.path());
    assert!(found.contains(".qzeros` has the zero point 127 ") && found.contains("which means 128"), "{found}");
}

/// Without `sym`, zero points that are all next to the middle belong to the other convention.
#[test]
fn zero_points_of_the_other_convention_are_refused_with_the_name_of_theirs() {
    fn without(config: &mut Value, keys: &[&str]) {
        keys.iter().for_each(|key| drop(config.as_object_mut().unwrap().shift_remove(*key)));
    }
    let none = |config: &mut Value| without(config, &["sym", "checkpoint_format"]);
    let v2 = |config: &mut Value| {
        without(config, &["sym"]);
        config["checkpoint_format"] = json!("gptq_v2");
    };
    let next_nibbles = |byte: u8| byte + 0x11;
    for (folder, zero, other, read_as) in [
        (with_zeros("gptq-actorder-g64", none, next_nibbles), 9, "gptq_v2", "gptq"),
        (with_zeros("gptq-actorder-g64", v2, |byte| byte), 7, "gptq", "gptq_v2"),
        (with_zeros("gptq-8bit", none, |byte| byte + 1), 129, "gptq_v2", "gptq"),
        (with_zeros("gptq-8bit", v2, |byte| byte), 127, "gptq", "gptq_v2"),
    ] {
        let found = refused_by_pack(folder.path());
        let said = format!(
            ".qzeros` has the zero point {zero} everywhere, as a symmetric checkpoint of `{other}` that is read as `{read_as}`; set \
             `checkpoint_format` to \"{other}\" in its `quantization_config`"
        );
        assert!(found.contains(&said), "{found}");
    }
    // The same numbers under the other name.
    for name in ["gptq-actorder-g64", "gptq-8bit"] {
        let goldens = Goldens::open(&format!("quantised/{name}"));
        let (ids, want) = (goldens.ids("input_ids"), goldens.floats("logits"));
        let next = if name == "gptq-8bit" { |byte: u8| byte + 1 } else { next_nibbles };
        for folder in [with_zeros(name, none, |byte| byte), with_zeros(name, v2, next)] {
            assert!(max_difference(&logits(folder.path(), &ids).unwrap(), &want) < LOGITS_TOLERANCE, "{name}");
        }
    }
    for bits in [2, 3] {
        let found = refused_of("gptq-v1-asym", "bits", json!(bits));
        assert!(found.contains("`quantization_config.bits`: expected 4 or 8"), "{found}");
    }
}

#[test]
fn names_of_vllm_mean_what_those_of_transformers_mean() {
    let goldens = Goldens::open("quantised/fp8-block-ragged");
    let (ids, want) = (goldens.ids("input_ids"), goldens.floats("logits"));
    let folder = edited("quantised/fp8-block-ragged", |_, _| ());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"]["scale_fmt"] = json!("ue8m0");
    config["quantization_config"]["ignored_layers"] = json!(["lm_head"]);
    fs::write(&path, config.to_string()).unwrap();
    assert!(max_difference(&logits(folder.path(), &ids).unwrap(), &want) < LOGITS_TOLERANCE);
    // What is ignored has to be stored as values.
    config["quantization_config"]["ignored_layers"] = json!(["model.layers.0.mlp.down_proj"]);
    fs::write(&path, config.to_string()).unwrap();
    let refused = import(folder.path()).unwrap_err().to_string();
    assert!(refused.contains("down_proj.weight`: expected fp32, bf16 or fp16, found F8_E4M3"), "{refused}");
    let refused = refused_of("fp8-block-ragged", "scale_fmt", json!("float"));
    assert!(refused.contains("`quantization_config.scale_fmt`: expected ue8m0"), "{refused}");
}

fn refused_of(name: &str, key: &str, value: Value) -> String {
    refused(&format!("quantised/{name}"), |config| config[key] = value.clone())
}

/// These bytes are not from ModelOpt or AutoFP8, but they have the same layout: a byte a weight, and a scale for each matrix.
#[test]
fn fp8_of_modelopt_and_autofp8_is_that_of_compressed_tensors() {
    let name = "quantised/ct-fp8-static";
    let goldens = Goldens::open(name);
    let (ids, want) = (goldens.ids("input_ids"), goldens.floats("logits"));
    let modelopt = |groups: bool| {
        let weights = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
        let mut config =
            json!({ "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {} });
        if groups {
            config["config_groups"] = json!({ "group_0": { "targets": ["Linear"], "weights": weights } });
        }
        config
    };
    let auto = json!({ "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"] });
    let file = json!({ "producer": { "name": "modelopt" },
        "quantization": { "quant_algo": "FP8", "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"] } });
    for (config, own_file) in
        [(modelopt(true), None), (modelopt(false), None), (auto, None), (Value::Null, Some(file.clone()))]
    {
        let folder = edited(name, |_, _| ());
        let path = folder.path().join("config.json");
        let mut whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        whole["quantization_config"] = config.clone();
        fs::write(&path, whole.to_string()).unwrap();
        if let Some(file) = own_file {
            fs::write(folder.path().join("hf_quant_config.json"), file.to_string()).unwrap();
        }
        let found = logits(folder.path(), &ids).unwrap_or_else(|| panic!("{config}: {:?}", import(folder.path())));
        assert!(max_difference(&found, &want) < LOGITS_TOLERANCE, "{config}");
    }
    let mut int4 = modelopt(true);
    int4["config_groups"]["group_0"]["weights"]["num_bits"] = json!(4);
    let refused = refused(name, |config| *config = int4.clone());
    assert!(refused.contains("expected floats of 8 bits"), "{refused}");
}

/// A checkpoint with further tensors.
fn extended(name: &str, more: &[(String, Vec<u8>)]) -> tempfile::TempDir {
    let folder = edited(name, |_, _| ());
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut views: Vec<_> = tensors.tensors();
    for (name, data) in more {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F16, vec![data.len() / 2], data).unwrap();
        views.push((name.clone(), view));
    }
    let whole = safetensors::serialize(views, None).unwrap();
    fs::write(&path, whole).unwrap();
    folder
}

#[test]
fn biases_of_zeros_are_left_out_and_others_refused() {
    let name = "quantised/gptq-8bit";
    let bias =
        |value: u8| vec![("model.layers.0.mlp.down_proj.bias".to_string(), [vec![0, 0x80], vec![value; 254]].concat())];
    let imported = import(extended(name, &bias(0)).path()).unwrap();
    assert!(imported.notes.iter().any(|note| note.starts_with("1 biases that a ")), "{:?}", imported.notes);
    let refused = import(extended(name, &bias(1)).path()).unwrap_err().to_string();
    assert!(
        refused.contains("0.mlp.down_proj.bias` is a bias that `MistralForCausalLM` does not have, and is not zero"),
        "{refused}"
    );
}

#[test]
fn activations_that_stay_as_they_are_are_named() {
    for (name, note) in [
        ("ct-w8a8-int", "the checkpoint asks for activations in 8 bits (int, token); here they stay as they are"),
        ("fp8-block-ragged", "the checkpoint asks for activations in fp8 (dynamic)"),
        ("gptq-actorder-g64", "groups that do not follow each other along k: they are computed as stored, in fp32"),
    ] {
        let notes = import(&fixture(&format!("quantised/{name}"))).unwrap().notes;
        assert!(notes.iter().any(|found| found.contains(note)), "{name}: {notes:?}");
    }
}

/// 100 of k is no whole number of granules or groups of any format, and 61 rows of the head end inside a unit.
pub const ODD: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 100,
    "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 10, "intermediate_size": 86,
    "num_hidden_layers": 2, "vocab_size": 61, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true,
    "torch_dtype": "bfloat16"}"#;

#[test]
fn weights_rounded_here_are_computed_as_they_were_rounded() {
    let ids: Vec<u32> = (0..10).map(|i| i * 7 % 61).collect();
    let plain = import_config_only(ODD, 3).unwrap();
    let exact = reference::forward(&plain.graph, &plain.weights, &ids).concat();
    for (name, format) in NAMED.into_iter().filter(|(_, format)| !format.is_plain()) {
        let imported = rounded(import_config_only(ODD, 3).unwrap(), &all(format));
        let reference = reference::forward(&imported.graph, &imported.weights, &ids).concat();
        assert!(max_difference(&reference, &exact) > 1e-3, "{name} rounds");
        for precision in [FP32, Precision { weights: DType::Bf16, ..FP32 }] {
            let schedule = place(&imported, precision, 16);
            let spec = run(&imported, &schedule, Options::spec(), &ids);
            let fast = run(&imported, &schedule, Options::fast(), &ids);
            let threads = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(3) };
            assert!(run(&imported, &schedule, threads, &ids) == fast, "{name}: other bits on other threads");
            assert!(
                run(&imported, &schedule, Options::adversarial(Arithmetic::Fast, 5), &ids) == fast,
                "{name}: other bits"
            );
            // The embedding is bf16 in both, as synthetic weights are.
            let (a, b) = (max_difference(&fast, &spec), max_difference(&spec, &reference));
            assert!(a < 1e-4 && b < 1e-4, "{name}: fast to spec {a}, spec to reference {b}");
            let mut bytes = vec![];
            pack_pieces::<monobloc::pack::PackError>(&schedule, &imported.graph, &imported.weights, |at, piece| {
                assert_eq!(at, bytes.len() as u64);
                bytes.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
            assert_eq!(bytes, pack(&schedule, &imported.graph, &imported.weights).unwrap());
        }
    }
}

#[test]
fn overrides_leave_matrices_as_they_are() {
    let int8 = NAMED[2].1;
    let plan = FormatPlan {
        weights: Some(int8),
        head: Some(NAMED[1].1),
        experts: None,
        embed: None,
        layers: BTreeMap::from([(1, Format::by_group(Code::Int4, 64, ScaleCode::F16, false))]),
    };
    let imported = rounded(import_config_only(ODD, 3).unwrap(), &plan);
    let schedule = place(&imported, BF16, 16);
    let formats: Vec<String> = schedule
        .program
        .buffers
        .iter()
        .zip(matrices(&schedule.program))
        .filter_map(|(buffer, matrix)| Some(format!("{} {}", buffer.name, matrix?.format)))
        .collect();
    let of = |name: &str| formats.iter().find_map(|line| line.strip_prefix(&format!("{name}.weight "))).unwrap();
    assert_eq!((of("qkv.0"), of("down.1"), of("head")), ("int8 by row", "int4 by 64 fp16", "bf16"));
    assert!(pack_bytes(&schedule) < pack_bytes(&place(&import_config_only(ODD, 3).unwrap(), BF16, 16)));

    let missing = FormatPlan { layers: BTreeMap::from([(2, int8)]), ..FormatPlan::default() };
    let mut imported = import_config_only(ODD, 3).unwrap();
    let found = round_matrices(&mut imported.graph, &mut imported.weights, &missing).unwrap_err();
    assert_eq!(found.to_string(), "`precision.layers` names layer 2, the model has 2");
    let mut stored = import(&fixture("quantised/mxfp4")).unwrap();
    let found = round_matrices(&mut stored.graph, &mut stored.weights, &all(int8)).unwrap_err().to_string();
    assert!(found.contains("asks for int8 of tensor") && found.contains("stores as e2m1 by 32 e8m0"), "{found}");
}

/// The embedding in every format of rounding, with a head in every other one, tied and untied. Reference and interpreter look up rows
/// with the rounded values, and a row takes only the bytes of its codes in the pack.
#[test]
fn an_embedding_has_a_format_of_its_own() {
    let names: Vec<&str> = NAMED.iter().filter(|(_, f)| !f.is_plain()).map(|(name, _)| *name).collect();
    let ids = [3u32, 17, 5, 3, 40];
    for tied in [true, false] {
        let config = ODD.replace("\"tie_word_embeddings\": true", &format!("\"tie_word_embeddings\": {tied}"));
        let of = |plan: &FormatPlan| rounded(import_config_only(&config, 3).unwrap(), plan);
        let plain = of(&FormatPlan::default());
        assert_eq!(plain.graph.head.weight.tensor == plain.graph.embed, tied, "{ODD}");
        for (at, name) in names.iter().enumerate() {
            let head = [None, Some(named(name)), Some(named(names[(at + 1) % names.len()]))][at % 3];
            let plan = FormatPlan { head, embed: Some(named(name)), ..FormatPlan::default() };
            let imported = of(&plan);
            let (graph, weights) = (&imported.graph, &imported.weights);
            assert_eq!(graph.formats.get(&graph.embed), Some(&named(name)));
            assert_eq!(graph.formats.get(&graph.head.weight.tensor).copied(), head, "{name}");
            // From the values that it had without a format.
            let (mut codes, mut values) = (CodedRow::default(), vec![0.0; graph.hidden as usize]);
            plain.weights.read_row_f32(plain.graph.embed, 17, &mut values);
            round_row(named(name), &values, &mut codes);
            codes.values(named(name), &mut values);
            let mut found = vec![0.0; values.len()];
            weights.read_row_f32(graph.embed, 17, &mut found);
            assert_eq!(found, values, "{name}");
            for precision in [FP32, BF16] {
                let schedule = place(&imported, precision, 16);
                let bytes = pack_bytes(&schedule);
                let before = pack_bytes(&place(&of(&FormatPlan { embed: None, ..plan.clone() }), precision, 16));
                assert!(bytes < before, "{name}: {bytes} of {before}");
            }
            let schedule = place(&imported, FP32, 16);
            let want = reference::forward(graph, weights, &ids).concat();
            let logits = run(&imported, &schedule, Options::fast(), &ids);
            let difference = max_difference(&logits, &want);
            assert!(difference < LOGITS_TOLERANCE, "{name}, tied {tied}: {difference}");
            // The format matters.
            let other = reference::forward(&plain.graph, &plain.weights, &ids).concat();
            assert!(max_difference(&want, &other) > 1e-4, "{name}");
        }
    }
}

/// The rules that a proven schedule, of int4 in groups of 32 and of int8 by row, violates after `edit`.
fn broken(edit: impl Fn(&mut Schedule)) -> Vec<Rule> {
    let plan = FormatPlan {
        weights: Some(Format::by_group(Code::Int4, 32, ScaleCode::F16, false)),
        head: Some(NAMED[2].1),
        ..FormatPlan::default()
    };
    let imported = rounded(import_config_only(ODD, 3).unwrap(), &plan);
    let mut schedule = place(&imported, BF16, 16);
    edit(&mut schedule);
    let mut rules: Vec<Rule> = check(&schedule, &Target::builtin("cpu").unwrap()).iter().map(|v| v.rule).collect();
    rules.sort_unstable();
    rules.dedup();
    rules
}

#[test]
fn schedules_that_mistake_a_format_are_refused() {
    assert_eq!(broken(|_| ()), []);
    let coded = |s: &mut Schedule, name: &str| {
        let id = s.program.buffers.iter().position(|b| b.name == format!("{name}.weight")).unwrap();
        (id, s.program.buffers[id].coded.unwrap())
    };
    let matvec = |s: &mut Schedule, name: &str, edit: &dyn Fn(&mut MatVecVariant)| {
        let grid = GridId::from(s.program.grids.iter().position(|g| g.name == name).unwrap());
        let Some(Variant::MatVec(variant)) = s.variants.get_mut(&grid) else { panic!("{name} has a variant") };
        edit(variant);
    };
    // Granules without their scales, and granules with more scales.
    assert_eq!(broken(|s| matvec(s, "o.0", &|v| v.granule = 512)), [Rule::Variant]);
    assert_eq!(broken(|s| matvec(s, "o.0", &|v| v.granule += 256)), [Rule::Variant]);
    // Group sizes that do not exist.
    let groups = |s: &mut Schedule, k| {
        let (id, mut format) = coded(s, "o.0");
        format.groups.as_mut().unwrap().k = k;
        s.program.buffers[id].coded = Some(format);
    };
    assert!(broken(|s| groups(s, 48)).contains(&Rule::Format));
    assert!(broken(|s| groups(s, 0)).contains(&Rule::Format));
    // Twice the bits.
    let wider = broken(|s| {
        let (id, format) = coded(s, "down.0");
        s.program.buffers[id].coded = Some(Format { code: Code::Int8, ..format });
    });
    assert!(wider.contains(&Rule::Variant), "{wider:?}");
    // Another buffer where the scales of the head's rows are.
    let over = broken(|s| {
        let (head, _) = coded(s, "head");
        let end = matrices(&s.program)[head].unwrap().row_scales_at() + s.placement[head].unwrap();
        let (other, _) = coded(s, "qkv.0");
        s.placement[other] = Some(end);
    });
    assert!(!over.is_empty(), "two buffers share bytes");
    // Among constants only a table may have codes, and none has a format of values.
    let constant = |of_table: bool, format| {
        broken(|s| {
            let kind = |b: &Buffer| {
                matches!(
                    (&b.content, of_table),
                    (Some(Content::Tensor(_)), true) | (Some(Content::Vectors { .. }), false)
                )
            };
            let constant = s.program.buffers.iter_mut().find(|b| b.space == Space::Constant && kind(b)).unwrap();
            constant.coded = Some(format);
        })
    };
    assert_eq!(constant(true, NAMED[2].1), []);
    assert_eq!(constant(true, NAMED[1].1), [Rule::Format]);
    assert!(constant(false, NAMED[2].1).contains(&Rule::Format));
}

/// A format without instructions in a kernel is not scheduled, and the message says which formats have them.
#[test]
fn formats_without_a_kernel_are_refused_by_name() {
    let h200 = Target::builtin("h200").unwrap();
    for (name, why) in [
        (
            "nvfp4",
            "no kernel of `h200` streams a matrix of e2m1 by 16 e4m3 by row (`qkv.0`), expected groups of 32 weights or more",
        ),
        ("gptq-actorder-g64", "streams a matrix of fp32 (`qkv.0`), expected values of bf16"),
    ] {
        let imported = import(&fixture(&format!("quantised/{name}"))).unwrap();
        let candidate = Candidate { sms: 8, ..Candidate::default_for(&imported.graph, &h200, BF16) };
        let program = lower(&imported.graph, "test", BF16, 32, &candidate).unwrap();
        let found = schedule(program, &h200, &candidate).unwrap_err().to_string();
        assert!(found.contains(why), "{found}");
    }
}

/// The default candidate follows the bytes of a format: it fits the target, and a slot holds a unit of the model's width. With 4 bits no turn of a
/// warp ends inside a slot.
#[test]
fn default_candidates_fit_every_format() {
    let h200 = Target::builtin("h200").unwrap();
    for name in ["llama-3.2-1b", "llama-3.1-8b", "smollm2-135m"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("manifests/configs/{name}.json"));
        let config = fs::read_to_string(path).unwrap();
        for (format_name, format) in NAMED.into_iter().filter(|(_, format)| !format.is_plain()) {
            let imported = rounded(import_config_only(&config, 0).unwrap(), &all(format));
            let graph = &imported.graph;
            let candidate = Candidate::default_for(graph, &h200, BF16).for_context(4096);
            let program = lower(graph, name, BF16, 4096, &candidate).unwrap();
            let schedule = match schedule(program, &h200, &candidate) {
                Ok(schedule) => schedule,
                Err(refused) => panic!("{name} {format_name}: {refused}"),
            };
            let granules = graph.hidden.div_ceil(format.granule_k());
            let unit = granules * format.granule_bytes();
            assert!(unit <= candidate.slot_bytes, "{name} {format_name}: {unit} in {}", candidate.slot_bytes);
            if format.code.bits() == 4 {
                let of_up = |grid: &Grid| grid.site.is_some_and(|site| site.op == LayerOp::Up);
                let up = schedule.program.grids.iter().position(of_up).unwrap();
                let Some(Variant::MatVec(up)) = schedule.variants.get(&GridId::from(up)) else { panic!("{name}") };
                let (held, of_slot) = (up.units_per_warp, up.chunk / granules);
                let whole = up.units <= held || held.is_multiple_of(of_slot);
                assert!(whole, "{name} {format_name}: {held} held of {of_slot} in a slot");
            }
        }
    }
}

/// Granules of codes have their scales in them, so fewer fit a slot than of plain weights.
#[test]
fn a_slot_has_a_granule_of_codes_for_each_warp() {
    let h200 = Target::builtin("h200").unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/configs/smollm2-135m.json");
    let format = Format::by_group(Code::Int4, 32, ScaleCode::F16, true);
    let imported = rounded(import_config_only(&fs::read_to_string(path).unwrap(), 0).unwrap(), &all(format));
    let default = Candidate::default_for(&imported.graph, &h200, BF16).for_context(64);
    let place = |slot_bytes| {
        let candidate = Candidate {
            consumer_warps: 16,
            slot_bytes,
            ring_slots: 2,
            flight_high: 2,
            flight_low: 1,
            flight_free: 0,
            ..default.clone()
        };
        let program = lower(&imported.graph, "test", BF16, 64, &candidate).unwrap();
        schedule(program, &h200, &candidate)
    };
    let granule = format.granule_bytes();
    assert!(granule > 512, "{granule}");
    let refused = place(16 * 512).unwrap_err().to_string();
    assert!(refused.contains(&format!("16 granules of {granule} bytes")), "{refused}");
    let placed = place((16 * granule).next_multiple_of(512)).unwrap();
    if let Err(refused) = validate(placed, &h200) {
        panic!("{refused:?}");
    }
}
