//! The net below changes of code that makes kernels. `same` tests that programs compute their models. This file compares everything that
//! kernels are made of with a golden file of digests: emitted text, the tables that kernels walk, and the layout of
//! packs. One line for each model shape, weight format and target; one digest pair for each kernel.
//!
//! A change that is meant to change no kernel leaves `kernels.txt` as it is. Another one changes its lines, says why in its commit, and is
//! measured. `BLESS=1 cargo test --test net` writes the file again.

mod same;

use std::fs;
use std::path::{Path, PathBuf};

use monobloc::candidate::Candidate;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::codegen::waves::{emit as emit_waves, tables_digest};
use monobloc::codegen::{
    CONVOLVE_HEADERS, EXPERTS_HEADERS, HEADERS, JOIN_HEADERS, KernelSource, NET_HEADERS, ROWS_HEADERS, SAMPLER_HEADERS,
    SCAN_HEADERS, STATE_HEADERS, WAVES_HEADERS, sampler,
};
use monobloc::defaults::rows::{Room, kernel_rows, place_one_row, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::format::{FormatPlan, NAMED};
use monobloc::ir::print::print;
use monobloc::ir::schedule::Schedule;
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::{Imported, import_config_only};
use monobloc::model::graph::ModelGraph;
use monobloc::model::rounding::round_matrices;
use monobloc::pack::{identity, pack};
use monobloc::schedule::schedule;
use monobloc::target::{Target, TargetKind};
use monobloc::validate::{Validated, validate};
use monobloc::waves::parse::parse;
use monobloc::waves::{
    self, Form, Plan, Proven, Refused, derive, derive_alike, derive_ragged, prove, prove_alike, prove_tail,
};
use rayon::prelude::*;
use serde_json::Value;

/// The formats of weights, as a manifest calls them.
const FORMATS: [&str; 6] = ["fp32", "bf16", "fp8", "int8", "int4:128", "mxfp4"];
/// Long enough for histories in KV splits; models with fewer positions have those.
const CONTEXT_MAX: u32 = 16384;
/// Requests and positions of the batch kernels.
const SEQUENCES: u32 = 8;
const POSITIONS: u64 = 65536;
const PAGE_ROWS: u32 = 16;

/// Layers of the shortest model with every kind of layer: Gemma's sixth one differs. Text and tables of more layers repeat.
fn layers(config: &Value) -> u64 {
    config["sliding_window_pattern"].as_u64().unwrap_or(2)
}

/// Cuts a config to few layers, and to as many experts as a token takes: the text of a kernel has their number as a number.
fn cut(config: &mut Value) {
    let layers = layers(config);
    config["num_hidden_layers"] = layers.into();
    if let Some(kinds) = config.get_mut("layer_types").and_then(Value::as_array_mut) {
        kinds.truncate(layers as usize);
    }
    let Some(chosen) = config.get("num_experts_per_tok").cloned() else { return };
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        config.get_mut(key).into_iter().for_each(|experts| experts.clone_from(&chosen));
    }
}

/// Models whose kernels are not in the net, which would take minutes: tests of their ops have their programs at small shapes.
const LEFT_OUT: [&str; 2] = ["granite-4.0-h-1b", "lfm2-1.2b"];

/// Hybrids whose kernels of every kind are in the net, on one target: a layer with a state, and one with attention. Of the shapes above, the
/// first layers have no attention, and so no batch kernels.
fn hybrids() -> Vec<(&'static str, Value)> {
    let shape = |(name, kinds): (&'static str, [&str; 2])| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("manifests/configs/{name}.json"));
        let mut config: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        config["num_hidden_layers"] = 2.into();
        match config["full_attn_idxs"].is_array() {
            true => config["full_attn_idxs"] = vec![1].into(),
            false => config["layer_types"] = kinds.to_vec().into(),
        }
        (name, config)
    };
    let all = [
        ("granite-4.0-h-1b", ["mamba", "attention"]),
        ("lfm2-1.2b", ["conv", "full_attention"]),
        ("qwen3.5-0.8b", ["linear_attention", "full_attention"]),
    ];
    all.map(shape).to_vec()
}

/// The other shapes of `manifests/configs`, cut, by name.
fn shapes() -> Vec<(String, Value)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/configs");
    let mut paths: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    let shape = |path: PathBuf| {
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        cut(&mut config);
        (path.file_stem().unwrap().display().to_string(), config)
    };
    paths.into_iter().map(shape).filter(|(name, _)| !LEFT_OUT.contains(&name.as_str())).collect()
}

/// The model of a config with weights of a format.
fn model(config: &Value, format: &str) -> Imported {
    let mut imported = import_config_only(&config.to_string(), 7).unwrap();
    let named = NAMED.into_iter().find(|(name, _)| *name == format).unwrap().1;
    // Plain weights are what `Precision` says, and nothing is rounded.
    if !named.is_plain() {
        let plan = FormatPlan { weights: Some(named), ..FormatPlan::default() };
        round_matrices(&mut imported.graph, &mut imported.weights, &plan).unwrap();
    }
    imported
}

fn precision(format: &str) -> Precision {
    let dtype = if format == "fp32" { DType::F32 } else { DType::Bf16 };
    Precision { weights: dtype, cache: dtype, wire: dtype }
}

/// Eight digits are enough: two texts are compared, not millions.
fn short(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..8].to_string()
}

/// Headers have lines of their own, and a kernel's line changes with its own text alone.
fn text(source: &KernelSource) -> String {
    let names: Vec<&str> = source.headers.iter().map(|(name, _)| name.as_str()).collect();
    short(format!("{} {} {}", source.arch, names.join(" "), source.text).as_bytes())
}

/// Of a kernel whose SMs walk queues: text and tables. On `cpu` the schedule is what runs.
fn of_queues(schedule: Schedule, target: &Target) -> (String, Validated) {
    let validated = validate(schedule, target).unwrap_or_else(|refused| panic!("{}: {refused}", target.name));
    let digests = match target.kind {
        TargetKind::Cpu => short(print(validated.schedule()).as_bytes()),
        TargetKind::Cuda => {
            let tables = Queues::of(&validated).digest().to_string();
            format!("{}/{}", text(&emit(&validated, target, Trace::Off)), &tables[..8])
        }
    };
    (digests, validated)
}

/// Of a kernel that runs wave by wave. Its text is read as what was printed.
fn of_waves(proven: &Proven<'_>, target: &Target) -> String {
    let schedule = proven.validated().schedule();
    let read = parse(&waves::print(schedule, [proven.plan()])).unwrap_or_else(|error| panic!("{error}"));
    assert!(read.schedule == *schedule && matches!(&read.plans[..], [(plan, _)] if plan == proven.plan()));
    let tables = tables_digest(proven).to_string();
    format!("{}/{}", text(&emit_waves(proven, target, Trace::Off)), &tables[..8])
}

fn proven<'a>(plan: Plan, validated: &'a Validated, target: &Target) -> Proven<'a> {
    prove(plan, validated, target).unwrap_or_else(|violations| panic!("{}: {violations:?}", target.name))
}

/// The wave kernels over the pack and the pages of a batch kernel.
fn waves_of(validated: &Validated, target: &Target) -> Vec<String> {
    let plan = |form, rows| derive(validated.schedule(), target, form, rows);
    let line = |name: &str, plan: Result<Plan, Refused>| match plan {
        Ok(plan) => format!("{name} {}", of_waves(&proven(plan, validated, target), target)),
        Err(_) => format!("{name} none"),
    };
    let mut lines = vec![line("chunk", plan(Form::Chunk, 512))];
    lines.push(match (plan(Form::Chunk, 512), plan(Form::Tail, 16)) {
        (Ok(chunk), Ok(tail)) => {
            let both = prove_tail(tail, proven(chunk, validated, target), target).unwrap();
            format!("tail {}", of_waves(both.tail(), target))
        }
        _ => "tail none".to_string(),
    });
    lines.extend([32, 64, 128].map(|rows| line(&format!("wave:{rows}"), plan(Form::Steps, rows))));
    lines.push(line("splits:32", derive_ragged(validated.schedule(), target, 32)));
    if let Ok(plans) = derive_alike(validated.schedule(), target, &[32, 64]) {
        let alike = prove_alike(plans, validated, target).unwrap();
        lines.extend(alike.plans().iter().map(|p| format!("alike:{} {}", p.plan().rows, of_waves(p, target))));
    }
    lines
}

/// Every kernel of a model on a target; `none` where it has none.
fn kernels(graph: &ModelGraph, format: &str, target: &Target) -> String {
    let (precision, context_max) = (precision(format), graph.positions_max.min(CONTEXT_MAX));
    let base = Candidate::default_for(graph, target, precision).for_context(context_max);
    let decode =
        lower(graph, "net", precision, context_max, &base).and_then(|program| schedule(program, target, &base));
    let Ok(decode) = decode else { return "none".to_string() };
    let pack = short(&identity(&decode));
    let mut found = vec![format!("pack {pack}"), format!("decode {}", of_queues(decode, target).0)];
    let room = |rows| Room { rows, sequences: SEQUENCES, positions: POSITIONS };
    if target.kind == TargetKind::Cpu {
        let pages = context_max / PAGE_ROWS;
        let batch = Batch { rows: 4, sequences: SEQUENCES, pages, page_rows: PAGE_ROWS, words: false };
        let program = lower_batch(graph, "net", precision, context_max, &batch, &base);
        let placed = program.and_then(|program| schedule(program, target, &base));
        found.push(format!("batch:4 {}", placed.map_or("none".to_string(), |placed| of_queues(placed, target).0)));
        return found.join(" ");
    }
    let paged = place_one_row(graph, "net", precision, context_max, target, &base, room(1));
    found.push(format!("paged {}", paged.map_or("none".to_string(), |placed| of_queues(placed, target).0)));
    for (index, &rows) in kernel_rows(graph, precision, target).iter().enumerate() {
        match place_rows(graph, "net", precision, context_max, target, &base, room(rows)) {
            Ok(placed) => {
                let (digests, validated) = of_queues(placed, target);
                found.push(format!("batch:{rows} {digests}"));
                if index == 0 {
                    found.extend(waves_of(&validated, target));
                }
            }
            Err(_) => found.push(format!("batch:{rows} none")),
        }
    }
    found.join(" ")
}

/// A narrow model of the same family: its packed bytes can be made in milliseconds.
fn narrow(config: &Value) -> Value {
    let mut config = config.clone();
    let sizes = [
        ("hidden_size", 256),
        ("intermediate_size", 384),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("head_dim", 64),
        ("vocab_size", 512),
    ];
    for (key, size) in sizes {
        if config[key].is_u64() {
            config[key] = size.into();
        }
    }
    config
}

/// Bytes of a pack.
fn packed(config: &Value, format: &str) -> String {
    let imported = model(&narrow(config), format);
    let target = Target::builtin("cpu").unwrap();
    let candidate = Candidate::default_for(&imported.graph, &target, precision(format)).for_context(64);
    let program = lower(&imported.graph, "net", precision(format), 64, &candidate).unwrap();
    let placed = schedule(program, &target, &candidate).unwrap();
    short(&pack(&placed, &imported.graph, &imported.weights).unwrap())
}

fn found() -> String {
    let mut lines: Vec<String> = vec![];
    for (group, headers) in [
        ("all", &HEADERS[..]),
        ("batch", &ROWS_HEADERS),
        ("wave", &WAVES_HEADERS),
        ("experts", &EXPERTS_HEADERS),
        ("states", &STATE_HEADERS),
        ("nets", &NET_HEADERS),
        ("mamba", &SCAN_HEADERS),
        ("convolutions", &CONVOLVE_HEADERS),
        ("drafts", &JOIN_HEADERS),
        ("sampler", &SAMPLER_HEADERS),
    ] {
        lines.extend(headers.iter().map(|(name, text)| format!("header {group} {name} {}", short(text.as_bytes()))));
    }
    let targets: Vec<Target> = Target::builtin_names().map(|name| Target::builtin(name).unwrap()).collect();
    let cuda = targets.iter().filter(|target| target.kind == TargetKind::Cuda);
    lines.extend(cuda.map(|target| format!("sampler {} {}", target.name, text(&sampler::emit(target)))));
    let models: Vec<_> = shapes()
        .into_iter()
        .flat_map(|(name, config)| FORMATS.map(|format| (name.clone(), config.clone(), format)))
        .collect();
    lines.par_extend(
        models.par_iter().map(|(name, config, format)| format!("packed {name} {format} {}", packed(config, format))),
    );
    lines.par_extend(models.par_iter().flat_map(|(name, config, format)| {
        let graph = model(config, format).graph;
        let line =
            move |target: &Target| format!("{name} {format} {}: {}", target.name, kernels(&graph, format, target));
        targets.par_iter().map(line).collect::<Vec<_>>()
    }));
    let h200 = Target::builtin("h200").unwrap();
    lines.par_extend(hybrids().par_iter().map(|(name, config)| {
        format!("hybrid {name} bf16 h200: {}", kernels(&model(config, "bf16").graph, "bf16", &h200))
    }));
    lines.join("\n") + "\n"
}

#[test]
fn kernels_are_byte_for_byte_the_same() {
    let found = found();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/net/kernels.txt");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&golden, &found).unwrap();
    }
    let expected = fs::read_to_string(&golden).unwrap();
    let changed: Vec<String> = found
        .lines()
        .zip(expected.lines())
        .filter(|(found, expected)| found != expected)
        .map(|(found, expected)| format!("- {expected}\n+ {found}"))
        .collect();
    assert!(changed.is_empty(), "{} lines changed; `BLESS=1` writes them:\n{}", changed.len(), changed.join("\n"));
    assert_eq!(found.lines().count(), expected.lines().count(), "`BLESS=1` writes the file again");
}
