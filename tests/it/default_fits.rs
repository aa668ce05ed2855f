//! Tests that defaults fit: the kernels of real models on every target record, and what the `cpu` target makes by default.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use monobloc::candidate::{Candidate, FormatCause, Infeasible};
use monobloc::defaults::rows::{Room, cpu_candidate, kernel_rows, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::ir::schedule::Schedule;
use monobloc::lower::{Batch, lower};
use monobloc::model::config::{Imported, import_config_only};
use monobloc::model::graph::ModelGraph;
use monobloc::schedule::schedule;
use monobloc::target::{Target, TargetKind};
use monobloc::validate::check;
use rayon::prelude::*;
use serde_json::Value;

use crate::cli_support::{Place, manifest_text};
use crate::formats::{all, named, rounded};
use crate::proof_support::{BF16, FP32, listed};
use crate::support::{self, fixture};

const CONTEXT_MAX: u32 = 4096;

/// Models that are also tried with codes and in fp32: wide and narrow ones, large heads, many layers.
const IN_ALL_FORMATS: [&str; 5] =
    ["llama-3.2-1b", "Qwen/Qwen3-8B", "microsoft/phi-4", "google/gemma-2-2b", "HuggingFaceTB/SmolLM2-1.7B"];

/// Models whose kernels are proven, too.
const PROVEN: [&str; 3] = ["smollm2-135m", "google/gemma-3-270m", "EleutherAI/pythia-70m"];

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Configs by the name of their model: those of `manifests/configs`, and published ones.
fn configs() -> BTreeMap<String, String> {
    let published = fs::read_to_string(repository("tests/fixtures/configs/published.json")).unwrap();
    let published: BTreeMap<String, Value> = serde_json::from_str(&published).unwrap();
    let mut configs: BTreeMap<String, String> =
        published.into_iter().map(|(name, config)| (name, config.to_string())).collect();
    for path in support::configs() {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        configs.insert(name, fs::read_to_string(&path).unwrap());
    }
    configs
}

fn imported(name: &str, config: &str) -> Imported {
    import_config_only(config, 0).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A model with weights of one format, and how it is computed.
struct Case {
    /// Name and format.
    what: String,
    name: String,
    graph: ModelGraph,
    precision: Precision,
    /// About as many bytes as the weights take.
    bytes: u64,
}

fn cases() -> Vec<Case> {
    let of = |(name, config): (String, String)| {
        let formats: &[&str] =
            if IN_ALL_FORMATS.contains(&name.as_str()) { &["bf16", "fp32", "int8", "int4:128"] } else { &["bf16"] };
        let case = |format: &&str| {
            let plain = imported(&name, &config);
            let (graph, precision, bits) = match *format {
                "bf16" => (plain.graph, BF16, 16),
                "fp32" => (plain.graph, FP32, 32),
                "int8" => (rounded(plain, &all(named(format))).graph, BF16, 8),
                _ => (rounded(plain, &all(named(format))).graph, BF16, 4),
            };
            let bytes = graph.parameter_count() * bits / 8;
            Case { what: format!("{name} in {format}"), name: name.clone(), graph, precision, bytes }
        };
        formats.iter().map(case).collect::<Vec<_>>()
    };
    configs().into_iter().collect::<Vec<_>>().into_par_iter().flat_map_iter(of).collect()
}

/// The schedule of a kernel, or `None` if shared memory has no room for it.
fn room_for(placed: Result<Schedule, Infeasible>, at: &str) -> Option<Schedule> {
    match placed {
        Ok(placed) => Some(placed),
        Err(Infeasible::SharedMemory { .. }) => None,
        Err(other) => panic!("{at}: {other}"),
    }
}

/// What has no room on a target with enough memory for the weights.
fn without_room(case: &Case, target: &Target) -> Vec<String> {
    let Case { what, name, graph, precision, .. } = case;
    let (precision, context_max) = (*precision, CONTEXT_MAX.min(graph.positions_max));
    let at = format!("{what} on {}", target.name);
    let base = Candidate::default_for(graph, target, precision).for_context(context_max);
    let program = lower(graph, name, precision, context_max, &base).unwrap_or_else(|error| panic!("{at}: {error}"));
    let Some(one) = room_for(schedule(program, target, &base), &at) else { return vec![format!("{at}: any kernel")] };
    let prove = |placed: &Schedule| {
        if PROVEN.contains(&name.as_str()) {
            let violations = check(placed, target);
            assert!(violations.is_empty(), "{at}\n{}", listed(&violations));
        }
    };
    prove(&one);
    if target.kind == TargetKind::Cpu {
        let fits = |rows: &u32| {
            let batch = Batch { rows: *rows, sequences: 1, pages: 256, page_rows: 16, words: false };
            cpu_candidate(graph, precision, context_max, target, &base, &batch).is_ok()
        };
        let most = [16, 8, 4].into_iter().find(fits).unwrap_or_else(|| panic!("{at}: steps of 4 rows"));
        return if most == 16 { vec![] } else { vec![format!("{at}: steps of more than {most} rows")] };
    }
    // Steps of more rows run in several launches of the smallest kernel, or wave by wave over its schedule.
    let smallest = kernel_rows(graph, precision, target)[0];
    let place = |rows| {
        let room = Room { rows, sequences: rows, positions: u64::from(context_max) };
        room_for(place_rows(graph, name, precision, context_max, target, &base, room), &at)
    };
    let Some(few) = place(smallest) else { return vec![format!("{at}: a kernel for rows")] };
    // Batch kernels read a prompt in chunks into pages. The decode kernel shares their cache only if pages divide its context.
    let pages = few.program.buffers.iter().filter_map(|buffer| buffer.paging);
    for rows in pages.map(|paging| paging.rows) {
        assert_eq!(context_max % rows, 0, "{at}: pages of {rows} positions");
    }
    prove(&few);
    if precision == BF16 && target.spec.smem_bytes_per_block_max > 200_000 {
        assert!(place(16).is_some(), "{at}: 16 rows");
    }
    vec![]
}

/// The kernels that commands make by default, of 14 shapes of ours and 33 others. The exceptions are in a file: inputs of wide models and
/// queues of deep ones are more than the shared memory of the target holds, and steps on `cpu` then have fewer rows.
#[test]
fn default_kernels_of_real_models_fit_every_record() {
    let targets: Vec<Target> = Target::builtin_names().filter_map(Target::builtin).collect();
    let cases = cases();
    assert!(cases.len() > 50, "{}", cases.len());
    let jobs: Vec<(&Case, &Target)> =
        cases.iter().flat_map(|case| targets.iter().map(move |target| (case, target))).collect();
    let found: BTreeSet<String> = jobs
        .into_par_iter()
        .filter(|(case, target)| target.kind == TargetKind::Cpu || case.bytes + (1 << 30) < target.spec.memory_bytes)
        .flat_map_iter(|(case, target)| without_room(case, target))
        .collect();
    let path = repository("tests/fixtures/configs/without_room.txt");
    let lines: String = found.iter().map(|line| format!("{line}\n")).collect();
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &lines).unwrap();
    }
    assert_eq!(lines, fs::read_to_string(&path).unwrap(), "BLESS=1 writes the file anew");
}

/// One of gate and up is stored as codes, the other one as values: they are stored as fp32, which kernels take where values are fp32.
#[test]
fn parts_in_two_formats_run_in_fp32_values() {
    let mut graph = imported("tiny", &shape("smollm2-135m", 2)).graph;
    let gates: Vec<_> =
        graph.layers.iter().filter_map(|layer| Some(layer.feed.dense()?.gate.as_ref()?.weight.tensor)).collect();
    graph.formats.extend(gates.into_iter().map(|gate| (gate, named("int4:64"))));
    let target = Target::builtin("h200").unwrap();
    let place = |precision| {
        let base = Candidate::default_for(&graph, &target, precision);
        let one = schedule(lower(&graph, "mixed", precision, 256, &base)?, &target, &base)?;
        let room = Room { rows: 8, sequences: 8, positions: 1024 };
        Ok((one, place_rows(&graph, "mixed", precision, 256, &target, &base, room)?))
    };
    let Err(Infeasible::Format { matrix, cause, .. }) = place(BF16) else { panic!("values of two types") };
    assert_eq!((matrix.as_str(), cause), ("gate_up.0", FormatCause::Plain));
    let fp32_values = Precision { weights: DType::F32, ..BF16 };
    let (one, rows) = place(fp32_values).unwrap();
    for placed in [one, rows] {
        let violations = check(&placed, &target);
        assert!(violations.is_empty(), "{}", listed(&violations));
    }
}

/// A config of ours with fewer layers and tokens.
fn shape(name: &str, layers: u32) -> String {
    let text = fs::read_to_string(repository(&format!("manifests/configs/{name}.json"))).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["num_hidden_layers"] = layers.into();
    config["vocab_size"] = 512.into();
    config["bos_token_id"] = 1.into();
    config["eos_token_id"] = 2.into();
    config.to_string()
}

/// A place with a manifest of a shape on `cpu` that asks for nothing but `more`.
fn on_cpu(name: &str, layers: u32, more: &str) -> Place {
    let place = Place::new();
    place.write("config.json", shape(name, layers));
    let text = manifest_text("synthetic:config.json", 64).replace("\"fp32\"", "\"bf16\"");
    place.write("m.toml", format!("{text}{more}"));
    place
}

/// Steps of 16 rows have no room beside the ring of the default for one row.
#[test]
fn default_manifests_run_on_cpu() {
    for (name, layers) in [("smollm2-135m", 20), ("tinyllama-1.1b", 2)] {
        let place = on_cpu(name, layers, "");
        let answer = place.run("generate m.toml --ids 1,2,3 --max-tokens 2").code(0);
        assert_eq!(answer.stdout.trim().split(',').count(), 2, "{name}: {answer:?}");
        place.run("logits m.toml --ids 1,2,3 --out logits.safetensors").code(0);
    }
}

/// The kernels of a server have default sizes that fit, and so have those of an export.
#[test]
fn an_export_has_steps_that_fit() {
    let place = on_cpu("tinyllama-1.1b", 2, "");
    let made = place.run("generate m.toml --ids 1,2,3 --max-tokens 3").code(0).stdout;
    place.run("export m.toml --out out").code(0);
    assert_eq!(place.run("generate out --ids 1,2,3 --max-tokens 3").code(0).stdout, made);
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let decode = |key: &str| format!("chunk_max = {key}\nsteps_per_launch = 2");
    let place = on_cpu("tinyllama-1.1b", 2, "");
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    place.write("long.toml", text.replace("steps_per_launch = 2", &decode("200")).replace("= 64", "= 256"));
    let ids = "generate long.toml --ids 1,2 --max-tokens 1";
    place.run(ids).refused(&["steps of 200 rows do not fit `cpu`", "help: lower `decode.chunk_max`\n"]);
    place.run("serve m.toml --max-batch 200").refused(&["steps of 201 rows do not fit", "help: lower `--max-batch`\n"]);
    place
        .run("serve m.toml --max-batch 100 --max-chunk 100")
        .refused(&["steps of 200 rows do not fit", "help: lower `--max-batch` or `--max-chunk`\n"]);
}

/// A candidate is that of the decode kernel. Steps of several rows take of it what fits.
#[test]
fn a_candidate_for_one_row_leaves_room_for_rows() {
    let place = on_cpu("tinyllama-1.1b", 2, "candidate = \"ring_slots=7;slot_bytes=32768;flight_free=2\"\n");
    place.run("generate m.toml --ids 1,2,3 --max-tokens 2").code(0);
}

/// The candidate of the manifest is for its own weights: codes of 4 bits have more copies in flight than its ring has slots.
#[test]
fn each_format_has_a_candidate_of_its_own() {
    let place = Place::new();
    let model = format!("path:{}", fixture("tinystories-llama").display());
    place.write("m.toml", format!("{}candidate = \"ring_slots=6;flight_free=4\"\n", manifest_text(&model, 64)));
    place.write("text.txt", "Once upon a time there was a little dog.");
    let answer = place.run("perplexity m.toml text.txt --formats").code(0);
    for format in ["fp32", "int8", "int4:128", "mxfp4"] {
        assert!(answer.stdout.contains(&format!("\n{format} ")), "{format}: {answer:?}");
    }
}

/// What a kernel does not take is named with what helps.
#[test]
fn a_remedy_is_what_helps() {
    let place = Place::new();
    let model = format!("path:{}", fixture("tinystories-llama").display());
    let text = manifest_text(&model, 64).replace("\"cpu\"", "\"h200\"");
    let coded = text.replace("weights = \"fp32\"", "weights = \"int4:128\"\nactivations = \"fp32\"");
    place.write("coded.toml", coded);
    place
        .run("show schedule coded.toml")
        .refused(&["activations in bf16", "`activations = \"bf16\"`, in `[precision]`"]);
    place.write("asked.toml", format!("{text}candidate = \"ring_slots=1\"\n"));
    place.run("show schedule asked.toml").refused(&["`ring_slots` is 1", "change the manifest's `candidate`"]);
}
