//! Generated kernels compile cleanly as CUDA C++, with each copy mechanism, with and without time stamps.
//!
//! Each kind of kernel is compiled as users have it, on every architecture for one row and for several. What only instantiates templates with
//! other sizes is compiled quickly (`quick`): that finds the same errors of the text and of its PTX.

use std::collections::BTreeSet;

use monobloc::candidate::{Candidate, KNOB_NAMES};
use monobloc::codegen::KernelSource;
use monobloc::codegen::emit::{ENTRY_POINT, Trace, emit};
use monobloc::cuda::cubin::{self, KernelResources};
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::defaults::rows::{Room, place_one_row, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::format::{Code, Format, ScaleCode};
use monobloc::ir::GridId;
use monobloc::ir::op::Op;
use monobloc::ir::schedule::Source;
use monobloc::ir::variant::swizzled_piece;
use monobloc::lower::lower;
use monobloc::model::config::{import, import_config_only};
use monobloc::model::graph::ModelGraph;
use monobloc::schedule::schedule;
use monobloc::search::Space;
use monobloc::target::{DotMechanism, Target};
use monobloc::validate::{Validated, validate};

use crate::formats::{ODD, all, named, rounded};
use crate::nvrtc::{compiles, nvrtc, quick};
use crate::proof_support::{BF16, FP32, TOY, Toy};
use crate::support::fixture;

fn proven(toy: &Toy, target: &Target) -> Validated {
    let candidate = Candidate::default_for(&toy.graph(), target, toy.precision);
    validate(toy.schedule(target, &candidate), target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// What a kernel takes of a device. It compiles without a warning.
fn resources(nvrtc: &Nvrtc, source: &KernelSource, what: &str) -> KernelResources {
    let compiled = nvrtc.compile(source).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(!compiled.log.contains("warning"), "{what}: {}", compiled.log);
    let mut resources = cubin::read(&compiled.cubin, &compiled.log).unwrap();
    resources.kernels.remove(ENTRY_POINT).expect("the entry point")
}

/// Compiles without a warning and without a spill.
fn compiles_unspilled(nvrtc: &Nvrtc, validated: &Validated, target: &Target, trace: Trace) {
    let kernel = resources(nvrtc, &emit(validated, target, trace), &format!("{}, {trace:?}", target.name));
    assert_eq!(kernel.spill_store_bytes, 0, "{}, {trace:?}: {kernel:?}", target.name);
}

#[test]
fn every_copy_mechanism_compiles_with_and_without_stamps() {
    let Some(nvrtc) = nvrtc("every_copy_mechanism_compiles_with_and_without_stamps") else { return };
    // Plain loads, cp.async and bulk copies; fp32 products and tensor cores.
    for (name, trace) in [("t4", Trace::On), ("a100", Trace::On), ("h200", Trace::Off), ("h200", Trace::On)] {
        let target = Target::builtin(name).unwrap();
        compiles_unspilled(nvrtc, &proven(&TOY, &target), &target, trace);
    }
}

/// Sizes and features that no other kernel here instantiates, each on another architecture.
#[test]
fn odd_sizes_and_every_kind_of_attention_compile() {
    let Some(nvrtc) = nvrtc("odd_sizes_and_every_kind_of_attention_compile") else { return };
    for (name, record, precision) in [
        // One layer, heads of 256, rows of 20 values; no tensor cores.
        ("variants/mistral-head-256", "t4", FP32),
        // Heads of 80, every bias, fp16 weights.
        ("variants/llama-head-80", "a10g", BF16),
        // Heads of 10, which are no vector, with gains of their own; partial rotary.
        ("variants/stablelm-qk-norm", "l4", BF16),
        // Norms of whole projections over nine heads.
        ("variants/olmo2-nine-heads", "a100", BF16),
        // Two rotary tables, softcaps.
        ("variants/gemma3-yarn", "h100", FP32),
        // Neighbouring pairs, a parallel block, heads of 32 with gains of their own.
        ("variants/cohere-qk-norm", "b200", BF16),
        // A context of one position.
        ("variants/llama-one-position", "rtx5090", BF16),
    ] {
        let target = Target::builtin(record).unwrap();
        let graph = import(&fixture(name)).unwrap().graph;
        let candidate = Candidate::default_for(&graph, &target, precision);
        let program = lower(&graph, name, precision, graph.positions_max.min(64), &candidate).unwrap();
        let placed = schedule(program, &target, &candidate).unwrap();
        let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        compiles(quick(nvrtc), &source, &format!("{name} on {record}"));
    }
}

/// Steps of one row over a pool of pages, in every way that their kernels copy and attend.
#[test]
fn kernels_for_one_row_over_pages_compile() {
    let Some(nvrtc) = nvrtc("kernels_for_one_row_over_pages_compile") else { return };
    let quick = quick(nvrtc);
    for (name, record, precision, compiler) in [
        ("tinystories-llama", "t4", FP32, quick),
        ("variants/llama-head-80", "a10g", BF16, quick),
        ("variants/gemma3-yarn", "h100", FP32, quick),
        ("variants/gemma3-yarn", "h200", BF16, nvrtc),
    ] {
        let target = Target::builtin(record).unwrap();
        let graph = import(&fixture(name)).unwrap().graph;
        let candidate = Candidate::default_for(&graph, &target, precision);
        let room = Room { rows: 8, sequences: 8, positions: 4096 };
        let placed = place_one_row(&graph, name, precision, graph.positions_max.min(64), &target, &candidate, room);
        let validated = validate(placed.unwrap(), &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        assert!(source.text.contains("PagedParams p") && source.text.contains("POOL_ROWS"), "{}", source.text);
        compiles(compiler, &source, &format!("{name} on {record}"));
    }
}

/// Steps of several rows, in every way that their kernels have: tensor cores and lanes, each copy mechanism, each kind of attention.
#[test]
fn kernels_for_rows_compile() {
    let Some(nvrtc) = nvrtc("kernels_for_rows_compile") else { return };
    let quick = quick(nvrtc);
    for (name, record, precision, rows, compiler) in [
        ("tinystories-llama", "t4", FP32, 8, quick),
        ("variants/llama-head-80", "a10g", BF16, 16, quick),
        ("variants/stablelm-qk-norm", "l4", BF16, 8, quick),
        ("variants/olmo2-nine-heads", "a100", BF16, 16, quick),
        ("variants/gemma3-yarn", "h100", FP32, 16, quick),
        ("variants/cohere-qk-norm", "b200", BF16, 8, quick),
        ("variants/gemma3-yarn", "h200", BF16, 16, nvrtc),
    ] {
        let target = Target::builtin(record).unwrap();
        let graph = import(&fixture(name)).unwrap().graph;
        let base = Candidate::default_for(&graph, &target, precision);
        let room = Room { rows, sequences: rows, positions: 4096 };
        let placed = place_rows(&graph, name, precision, graph.positions_max.min(64), &target, &base, room).unwrap();
        let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        compiles(compiler, &source, &format!("{name} on {record}"));
    }
}

/// Sums are arrays, and a compiler puts one that it cannot name by constants in local memory, where each product stores it. Units of four rows
/// have sums of two parts of k, of which a column takes one. Blocks of 40 granules take most registers of all.
#[test]
fn sums_of_rows_stay_in_registers() {
    let Some(nvrtc) = nvrtc("sums_of_rows_stay_in_registers") else { return };
    let tinyllama = include_str!("../../manifests/configs/tinyllama-1.1b.json").to_string();
    for (config, has) in [(tinyllama, "int UNIT_ROWS = 4;"), (wide_config(), "int CHUNK = 40;")] {
        let source = emit(&few_rows(&config, 16), &Target::builtin("h200").unwrap(), Trace::Off);
        assert!(source.text.contains(has), "{}", source.text);
        let kernel = resources(nvrtc, &source, has);
        assert!(kernel.stack_bytes <= 16, "{has} {kernel:?}");
    }
}

/// Kernels for few rows stream whole units of 1152 columns, and two blocks of 2560 where slots of 16 KiB would have three. Chunks of the history
/// still divide pages, which kernels with other slots share.
#[test]
fn kernels_for_few_rows_have_as_few_blocks_as_they_can() {
    let gemma = include_str!("../../manifests/configs/gemma-3-1b.json");
    let llama = include_str!("../../manifests/configs/llama-3.2-1b.json");
    for (config, rows, slot, chunks, history) in [
        (gemma, 8, 18 << 10, [18, 16, 36, 36], 32),
        (gemma, 16, 18 << 10, [16, 16, 36, 16], 32),
        (&wide_config(), 8, 20 << 10, [40, 32, 40, 40], 64),
        (llama, 8, 16 << 10, [32; 4], 128),
        (llama, 32, 8 << 10, [16; 4], 64),
    ] {
        let validated = few_rows(config, rows);
        let schedule = validated.schedule();
        assert_eq!(schedule.machine.ring.slot_bytes, slot, "{rows} rows");
        let grids = (0..).zip(&schedule.program.grids).filter(|(_, grid)| matches!(grid.op, Op::MatVec(_)));
        let found: Vec<u32> = grids.map(|(g, _)| schedule.matvec_variant(GridId(g)).unwrap().chunk).collect();
        assert_eq!(found[..4], chunks, "{rows} rows");
        let runs = schedule.regimes[0].streams.iter().flatten().filter_map(|run| match run.source {
            Source::History { rows } => Some(rows),
            Source::Units { .. } => None,
        });
        assert_eq!(runs.collect::<BTreeSet<u32>>(), BTreeSet::from([history]), "{rows} rows");
    }
}

/// The shapes of Qwen3-4B.
fn wide_config() -> String {
    let small = include_str!("../../manifests/configs/qwen3-0.6b.json");
    let of: [(&str, u32, u32); 3] =
        [("hidden_size", 1024, 2560), ("intermediate_size", 3072, 9728), ("num_attention_heads", 16, 32)];
    of.into_iter().fold(small.to_string(), |config, (key, from, to)| {
        let [from, to] = [from, to].map(|value| format!("\"{key}\": {value}"));
        assert!(config.contains(&from), "{from}");
        config.replace(&from, &to)
    })
}

/// One layer of a config in steps of `rows`.
fn few_rows(config: &str, rows: u32) -> Validated {
    let target = Target::builtin("h200").unwrap();
    let mut graph = import_config_only(config, 0).unwrap().graph;
    graph.layers.truncate(1);
    let base = Candidate::default_for(&graph, &target, BF16);
    let room = Room { rows, sequences: rows, positions: 4096 };
    let placed = place_rows(&graph, "rows", BF16, 1024, &target, &base, room).unwrap();
    validate(placed, &target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// Every format in steps of several rows: on tensor cores with each copy mechanism and with moved registers, and on lanes. Shapes of one
/// layer of Llama-3.2-1B, so that a matrix is several blocks of k.
#[test]
fn kernels_for_rows_of_codes_compile() {
    let Some(nvrtc) = nvrtc("kernels_for_rows_of_codes_compile") else { return };
    let llama = include_str!("../../manifests/configs/llama-3.2-1b.json");
    // A T4 has room for 8 rows of small models.
    let small = ODD;
    let zeros = Format::by_group(Code::Int4, 128, ScaleCode::F16, true);
    let blocks = Format::by_group(Code::E4m3, 128, ScaleCode::F32, false);
    for (format, record, rows) in [
        (named("int4:128"), "h200", 8),
        (named("int4:32"), "h200", 16),
        (zeros, "h100", 16),
        (named("int8"), "h200", 16),
        (blocks, "b200", 8),
        (named("fp8"), "rtx5090", 16),
        (named("mxfp4"), "h100", 8),
        (named("int8"), "a100", 8),
        (named("int4:64"), "l4", 16),
        (named("int4:128"), "t4", 8),
    ] {
        let target = Target::builtin(record).unwrap();
        let mut imported = import_config_only(if record == "t4" { small } else { llama }, 0).unwrap();
        imported.graph.layers.truncate(1);
        let graph = rounded(imported, &all(format)).graph;
        let base = Candidate::default_for(&graph, &target, BF16);
        let room = Room { rows, sequences: rows, positions: 4096 };
        let placed = place_rows(&graph, "codes", BF16, graph.positions_max.min(1024), &target, &base, room);
        let placed = placed.unwrap_or_else(|reason| panic!("{format} on {record}: {reason}"));
        let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{format}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        // Words are spilled around calls, as with values. Without moved registers some sums are, too.
        if validated.schedule().machine.loader_registers == 0 {
            compiles(quick(nvrtc), &source, &format!("{format} on {record}"));
            continue;
        }
        let spilled = resources(nvrtc, &source, &format!("{format} on {record}")).spill_store_bytes;
        assert!(spilled <= 8, "{format} on {record}: {spilled} bytes spilled");
    }
}

/// A cache in fp8 with one row and with eight, on every record: heads of 64 and 128 dimensions by tensor cores, others by lanes. Codes are
/// converted by instructions where the record says `fp8_cvt`, and by arithmetic elsewhere.
#[test]
fn kernels_of_a_cache_in_fp8_compile() {
    let Some(nvrtc) = nvrtc("kernels_of_a_cache_in_fp8_compile") else { return };
    let precision = Precision { cache: DType::E4m3, ..BF16 };
    let llama = include_str!("../../manifests/configs/llama-3.2-1b.json");
    let qwen = include_str!("../../manifests/configs/qwen3-0.6b.json");
    let mut compiled_for = BTreeSet::new();
    for (i, record) in Target::builtin_names().filter(|name| *name != "cpu").enumerate() {
        let target = Target::builtin(record).unwrap();
        // A T4 has room for 8 rows of small models.
        let config = if record == "t4" { ODD } else { [llama, qwen][i % 2] };
        // Kernels for two GPUs of one architecture differ in the number of SMs alone.
        let is_new = compiled_for.insert((target.spec.arch.clone(), config));
        let mut graph = import_config_only(config, 0).unwrap().graph;
        graph.layers.truncate(1);
        let candidate = Candidate::default_for(&graph, &target, precision);
        let context_max = graph.positions_max.min(1024);
        let one = lower(&graph, "fp8", precision, context_max, &candidate).unwrap();
        let room = Room { rows: 8, sequences: 8, positions: 4096 };
        let rows = place_rows(&graph, "fp8", precision, context_max, &target, &candidate, room).unwrap();
        // Once on each architecture that no other test compiles for one row, and for rows once with each way to copy.
        let whole: [&[&str]; 2] = [&["l4", "rtx5090", "b200"], &["a100", "h200"]];
        for (placed, whole) in [schedule(one, &target, &candidate).unwrap(), rows].into_iter().zip(whole) {
            let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{record}: {rejected}"));
            let source = emit(&validated, &target, Trace::Off);
            let tensor = target.spec.dot == DotMechanism::Mma;
            assert!(source.text.contains("Elem CACHE = Elem::FP8;"), "{record}");
            assert!(source.text.contains(&format!("bool SWIZZLED = {tensor};")), "{record}");
            if !is_new {
                continue;
            }
            let claims = (0..8).map(|position| {
                let piece = swizzled_piece(position, 0, 64);
                format!("static_assert(swizzle_of<64>({position}) == {piece} && swizzle_of<128>({position}) == swizzle({position}));\n")
            });
            let text = source.text.clone() + &claims.collect::<String>();
            let compiler = if whole.contains(&record) { nvrtc } else { quick(nvrtc) };
            compiles(compiler, &KernelSource { text, ..source }, record);
        }
    }
}

/// The record of a target decides how codes of fp8 are converted; the architecture does not.
#[test]
fn codes_of_fp8_are_converted_as_the_record_says() {
    let Some(nvrtc) = nvrtc("codes_of_fp8_are_converted_as_the_record_says") else { return };
    let llama = import_config_only(include_str!("../../manifests/configs/llama-3.2-1b.json"), 0).unwrap();
    let mut graph = rounded(llama, &all(named("fp8"))).graph;
    graph.layers.truncate(1);
    let precision = Precision { cache: DType::E4m3, ..BF16 };
    let mut claims = vec![];
    for (record, fp8_cvt) in [("a100", false), ("l4", true), ("l4", false)] {
        let mut target = Target::builtin(record).unwrap();
        claims.push((record, target.spec.fp8_cvt));
        target.spec.fp8_cvt = fp8_cvt;
        let candidate = Candidate::default_for(&graph, &target, precision);
        let program = lower(&graph, "fp8", precision, 256, &candidate).unwrap();
        let validated = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
        let ptx = quick(nvrtc).ptx(&emit(&validated, &target, Trace::Off)).unwrap_or_else(|error| panic!("{error}"));
        for (what, instruction) in [("weights", "cvt.rn.f16x2.e4m3x2"), ("cache", "cvt.rn.satfinite.e4m3x2.f32")] {
            assert_eq!(ptx.contains(instruction), fp8_cvt, "{record}, {fp8_cvt}: {what}");
        }
    }
    assert_eq!(claims, [("a100", false), ("l4", true), ("l4", true)], "the records that are built in");
}

/// The shape of one layer, and a target with everything that kernels may use.
fn layer_of_qwen3() -> (Target, ModelGraph) {
    let config = include_str!("../../manifests/configs/qwen3-0.6b.json");
    let mut graph = import_config_only(config, 0).unwrap().graph;
    graph.layers.truncate(1);
    (Target::builtin("h200").unwrap(), graph)
}

/// The host writes cache rows to the places where the kernel reads them.
#[test]
fn host_and_kernel_swizzle_cache_rows_alike() {
    let Some(nvrtc) = nvrtc("host_and_kernel_swizzle_cache_rows_alike") else { return };
    let (target, graph) = layer_of_qwen3();
    let candidate = Candidate::default_for(&graph, &target, BF16);
    let program = lower(&graph, "swizzled", BF16, 256, &candidate).unwrap();
    let validated = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
    let source = emit(&validated, &target, Trace::Off);
    assert!(source.text.contains("bool SWIZZLED = true;"));
    let with = |claim: &dyn Fn(u32) -> u32| {
        let claims = (0..16).map(|position| {
            format!("static_assert(swizzle({position}) == {}, \"position {position}\");\n", claim(position))
        });
        quick(nvrtc).ptx(&KernelSource { text: source.text.clone() + &claims.collect::<String>(), ..source.clone() })
    };
    with(&|position| swizzled_piece(position, 0, 256)).unwrap_or_else(|error| panic!("{error}"));
    assert!(with(&|position| swizzled_piece(position, 0, 256) ^ u32::from(position == 9)).is_err());
    for position in 0..16 {
        let mut places: Vec<u32> = (0..8).map(|piece| swizzled_piece(position, piece, 256)).collect();
        places.sort_unstable();
        assert_eq!(places, (0..8).collect::<Vec<_>>(), "a row keeps its pieces");
    }
    // Eight rows in turn put one piece into eight places; two rows put four pieces into all of them.
    for piece in 0..8 {
        let places: BTreeSet<u32> = (3..11).map(|position| swizzled_piece(position, piece, 256)).collect();
        assert_eq!(places.len(), 8);
    }
    let halves: BTreeSet<u32> = (6..8).flat_map(|p| (0..4).map(move |piece| swizzled_piece(p, piece, 256))).collect();
    assert_eq!(halves.len(), 8);
}

/// For each op, the variant that is farthest from the default.
#[test]
fn the_variants_of_all_ops_compile() {
    let Some(nvrtc) = nvrtc("the_variants_of_all_ops_compile") else { return };
    let (target, graph) = layer_of_qwen3();
    let space = Space::new(&graph, &target, BF16, 256, Candidate::default_for(&graph, &target, BF16), |_| 60_000);
    let default = space.default_candidate();
    let mut values = default.values();
    let variants = space.knobs().filter(|(knob, _)| !knob.ops.is_empty());
    let mut turned = vec![];
    for (knob, choices) in variants {
        let at = KNOB_NAMES.iter().position(|name| *name == knob.name).unwrap();
        values[at] = *choices.iter().max_by_key(|value| value.abs_diff(default.values()[at])).unwrap();
        turned.push(knob.name);
    }
    for knob in ["sum_units", "poll_pairs", "hold_up", "attention_team", "attention_ahead"] {
        assert!(turned.contains(&knob), "{knob} has one value: {turned:?}");
    }
    let text = |candidate: &Candidate| {
        let program = lower(&graph, "variants", BF16, 256, candidate).unwrap();
        let placed = schedule(program, &target, candidate).unwrap_or_else(|reason| panic!("{candidate}: {reason}"));
        let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{rejected}"));
        emit(&validated, &target, Trace::Off)
    };
    let source = text(&Candidate::of_values(&values));
    assert_ne!(source.text, text(default).text);
    compiles(nvrtc, &source, "all variants");
}
