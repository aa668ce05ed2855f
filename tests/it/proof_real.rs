//! Tests that the proof accepts the schedules that lowering makes: families, sizes, SMs, splits and mechanisms.

use std::collections::BTreeMap;
use std::path::Path;

use crate::formats::{all, rounded};
use crate::proof_support::*;
use crate::support::{checkpoints, fixture};
use monobloc::candidate::{Candidate, Infeasible};
use monobloc::defaults::rows::{Room, kernel_rows, place_one_row, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::format::NAMED;
use monobloc::ir::GridId;
use monobloc::ir::schedule::{Mechanism, Schedule};
use monobloc::ir::variant::Variant;
use monobloc::lower::lower;
use monobloc::model::config::{import, import_config_only};
use monobloc::model::graph::{ModelGraph, QkNormSpan};
use monobloc::rows::Shape;
use monobloc::schedule::schedule;
use monobloc::target::{Target, TargetKind};
use monobloc::validate::{Entity, Rule, Violation, check, share_caches, validate};

#[track_caller]
fn proven(toy: Toy, target: &Target, candidate: &Candidate) {
    let schedule = toy.schedule(target, candidate);
    let violations = check(&schedule, target);
    assert!(violations.is_empty(), "{toy:?} {candidate}\n{}", listed(&violations));
}

fn families() -> Vec<Toy> {
    vec![
        TOY,
        Toy { precision: FP32, ..TOY },
        Toy { precision: Precision { cache: FP32.cache, ..BF16 }, bias: true, ..TOY },
        Toy { precision: Precision { wire: FP32.wire, ..BF16 }, ..TOY },
        Toy { gated: false, bias: true, ..TOY },
        Toy { parallel: true, gated: false, bias: true, ..TOY },
        Toy { post_norms: true, window: Some(8), ..TOY },
        Toy { qk_norm: Some(QkNormSpan::Head), ..TOY },
        Toy { qk_norm: Some(QkNormSpan::OwnGains), parallel: true, ..TOY },
        Toy { qk_norm: Some(QkNormSpan::Projection), post_norms: true, ..TOY },
        Toy { rope: false, kv_heads: 4, ..TOY },
        Toy { kv_heads: 1, heads: 8, dim: 8, ..TOY },
        Toy { vocab: 201, intermediate: 50, hidden: 72, layers: 3, ..TOY },
    ]
}

#[test]
fn every_family_on_one_to_sixteen_sms() {
    for toy in families() {
        for sms in 1..=16 {
            proven(toy, &cpu(), &on_cpu(sms));
            proven(toy, &h200(), &on_h200(sms));
            if toy.post_norms {
                proven(toy, &cpu(), &Candidate { sums_everywhere: 1, ..on_cpu(sms) });
                proven(toy, &h200(), &Candidate { sums_everywhere: 1, ..on_h200(sms) });
            }
        }
    }
}

#[test]
fn splits_and_regimes() {
    for splits in [1, 2, 3, 8] {
        for split_from in [0, 1, 2, 31, 62, 63, 64] {
            proven(TOY, &h200(), &Candidate { splits, split_from, ..on_h200(5) });
            proven(TOY, &cpu(), &Candidate { splits, split_from, ..on_cpu(5) });
        }
    }
}

#[test]
fn every_mechanism_where_the_interpreter_stands_for_a_gpu() {
    for mechanism in [Mechanism::Packets, Mechanism::Fenced, Mechanism::Counter] {
        proven(TOY, &cpu(), &Candidate { mechanism, ..on_cpu(5) });
        // Today's kernels have packets alone, so the others are written into what was placed.
        let mut schedule = TOY.schedule(&h200(), &on_h200(5));
        if mechanism != Mechanism::Packets {
            schedule.regimes.iter_mut().flat_map(|r| &mut r.events).for_each(|event| event.mechanism = mechanism);
        }
        assert_eq!(check(&schedule, &beyond_kernels()), []);
    }
}

#[test]
fn what_does_not_fit_a_target_is_infeasible_and_says_why() {
    let why = |target: &Target, candidate: Candidate| {
        let graph = TOY.graph();
        let program = lower(&graph, "toy", TOY.precision, TOY.context, &candidate).expect("lowers");
        schedule(program, target, &candidate).expect_err("does not fit").to_string()
    };
    assert_eq!(
        why(&h200(), Candidate { mechanism: Mechanism::Counter, ..on_h200(4) }),
        "`mechanism` is counter, expected packets: the kernel of a CUDA target has no other"
    );
    // The barriers of 64 slots have room in shared memory, whatever the ring itself leaves.
    assert_eq!(
        why(&h200(), Candidate { ring_slots: 65, ..on_h200(4) }),
        "`ring_slots` is 65, expected 2, a key chunk and its value chunk, to 64"
    );
    let mut small = h200();
    small.spec.memory_bytes = 100_000;
    let found = why(&small, on_h200(4));
    assert!(found.starts_with("the model takes ") && found.ends_with("has 100000"), "{found}");
}

#[test]
fn one_position_and_one_layer() {
    proven(Toy { context: 1, layers: 1, ..TOY }, &h200(), &on_h200(3));
    proven(Toy { context: 2, layers: 1, ..TOY }, &h200(), &on_h200(3));
    proven(Toy { layers: 0, ..TOY }, &h200(), &on_h200(3));
}

#[test]
fn a_proven_schedule_comes_back_unchanged() {
    let (schedule, target) = toy();
    let proven = validate(schedule.clone(), &target).expect("the toy is proven");
    assert_eq!(proven.schedule(), &schedule);
    assert_eq!(proven.into_schedule(), schedule);
}

/// Proves the default candidates of a checkpoint's graph on every record. Returns how many there were, and those without room in the
/// shared memory of a block even in bf16.
fn proven_on_every_record(graph: &ModelGraph, name: &str, context_max: u32) -> (usize, Vec<String>) {
    let (mut count, mut without_room) = (0, vec![]);
    for target in Target::builtin_names().filter_map(Target::builtin) {
        for precision in [BF16, FP32, Precision { wire: DType::F32, ..BF16 }] {
            let candidate = Candidate::default_for(graph, &target, precision);
            let program = match lower(graph, name, precision, context_max, &candidate) {
                Ok(program) => program,
                Err(infeasible) => panic!("{name} on {}: {infeasible}", target.name),
            };
            let placed = match schedule(program, &target, &candidate) {
                Ok(placed) => placed,
                Err(Infeasible::DeviceMemory { .. }) => continue,
                // Inputs of a wide model, staged in fp32, are more than the smallest shared memory holds.
                Err(Infeasible::SharedMemory { .. }) if precision.wire == DType::F32 => continue,
                Err(Infeasible::SharedMemory { .. }) => {
                    without_room.push(format!("{name} on {}", target.name));
                    continue;
                }
                Err(infeasible) => panic!("{name} on {}, {candidate}: {infeasible}", target.name),
            };
            let mut violations = check(&placed, &target);
            // A model larger than the device: more weights alone than it has memory.
            if graph.parameter_count() * precision.weights.bytes() as u64 + (1 << 30) > target.spec.memory_bytes {
                violations.retain(|v| v.rule != Rule::DeviceMemory);
            }
            assert!(violations.is_empty(), "{name} on {}, {candidate}\n{}", target.name, listed(&violations));
            count += 1;
        }
    }
    (count, without_room)
}

/// Steps of 32 and 64 rows are proven if they fit, and refused if no kernel could compute them: codes, half a tile of rows, slots that
/// several threads fill.
#[test]
fn many_rows_on_every_record() {
    let config = include_str!("../../manifests/configs/smollm2-135m.json");
    let mut imported = import_config_only(config, 0).unwrap();
    imported.graph.layers.truncate(2);
    let plain = imported.graph;
    let place = |graph: &ModelGraph, target: &Target, rows: u32| {
        let base = Candidate::default_for(graph, target, BF16);
        place_rows(graph, "rows", BF16, 512, target, &base, Room { rows, sequences: rows, positions: 2048 })
    };
    let mut placed = vec![];
    for target in Target::builtin_names().filter_map(Target::builtin).filter(|t| t.kind == TargetKind::Cuda) {
        for &rows in kernel_rows(&plain, BF16, &target).iter().filter(|rows| **rows > 16) {
            let Ok(schedule) = place(&plain, &target, rows) else { continue };
            let violations = check(&schedule, &target);
            assert!(violations.is_empty(), "{rows} rows, {}: {}", target.name, listed(&violations));
            placed.push((target.name.clone(), rows));
        }
    }
    for (name, rows) in [("h200", 32), ("h200", 64), ("b200", 64), ("a100", 32)] {
        assert!(placed.contains(&(name.to_string(), rows)), "{rows} rows do not fit `{name}`: {placed:?}");
    }
    let h200 = Target::builtin("h200").unwrap();
    let refused = |schedule: &Schedule, message: &str| {
        let violations = check(schedule, &h200);
        let found = violations.iter().any(|v| v.rule == Rule::KernelRows && v.message == message);
        assert!(found, "{message}: {}", listed(&violations));
    };
    let half_a_tile = place(&plain, &h200, 24).unwrap();
    refused(&half_a_tile, "expected whole tiles of rows that 8 warps share evenly, found 24 rows");
    // Slots that change hands between the threads that copy.
    let sound = place(&plain, &h200, 32).unwrap();
    assert_eq!((sound.machine.ring.copiers, place(&plain, &h200, 16).unwrap().machine.ring.copiers), (4, 1));
    // Threads that no warp of the loader has, and none.
    for (fewer, copiers) in [(1, 4), (0, 5), (0, 0)] {
        let mut odd = sound.clone();
        odd.machine.ring.slots -= fewer;
        odd.machine.ring.copiers = copiers;
        let slots = odd.machine.ring.slots;
        let expected = format!("expected at most 4 threads that copy in turn, with as many of {slots} ring slots each");
        refused(&odd, &format!("{expected}, found {copiers}"));
    }
    let codes = NAMED.into_iter().find(|(_, format)| !format.is_plain()).unwrap().1;
    let mut coded = rounded(import_config_only(config, 0).unwrap(), &all(codes)).graph;
    coded.layers.truncate(2);
    assert_eq!(kernel_rows(&coded, BF16, &h200), [8, 16]);
    assert_eq!(place(&coded, &h200, 8).unwrap().machine.ring.copiers, 4);
    refused(&place(&coded, &h200, 32).unwrap(), "expected weights that are no codes in steps of 32 rows, found codes");
}

/// The kernel for one row over pages is proven if the one over one sequence's cache is, and can use the pages of kernels for rows.
#[test]
fn one_row_over_pages_on_every_record() {
    let config = include_str!("../../manifests/configs/smollm2-135m.json");
    let mut graph = import_config_only(config, 0).unwrap().graph;
    graph.layers.truncate(2);
    let mut count = 0;
    for target in Target::builtin_names().filter_map(Target::builtin).filter(|t| t.kind == TargetKind::Cuda) {
        for precision in [BF16, FP32] {
            let candidate = Candidate::default_for(&graph, &target, precision);
            let program = lower(&graph, "one", precision, 512, &candidate).unwrap();
            let Ok(alone) = schedule(program, &target, &candidate) else { continue };
            let room = Room { rows: 8, sequences: 8, positions: 2048 };
            let paged = place_one_row(&graph, "one", precision, 512, &target, &candidate, room).unwrap();
            let violations = check(&paged, &target);
            assert!(violations.is_empty(), "{}: {}", target.name, listed(&violations));
            assert_eq!(
                (&paged.regimes, &paged.variants, &paged.machine),
                (&alone.regimes, &alone.variants, &alone.machine)
            );
            if let Ok(rows) = place_rows(&graph, "one", precision, 512, &target, &candidate, room) {
                let shape = |schedule: &Schedule| Shape { rows: 0, ..Shape::of(&schedule.program).unwrap() };
                assert_eq!(shape(&paged), shape(&rows), "{}", target.name);
                let proven = |schedule: &Schedule| validate(schedule.clone(), &target).expect("a proof");
                assert_eq!(share_caches(&proven(&paged), &proven(&rows)), Ok(()), "{}", target.name);
                knows_one_size_of_pages(paged, &target);
                count += 1;
            }
        }
    }
    assert!(count > 10, "{count}");
}

/// In steps of 16 rows some matvecs share code. Any other one would compute something else with it.
#[test]
fn only_alike_products_share_code() {
    let target = h200();
    let toy = Toy { hidden: 256, intermediate: 512, heads: 4, kv_heads: 2, dim: 64, vocab: 512, ..TOY };
    let candidate = Candidate::default_for(&toy.graph(), &target, toy.precision);
    let placed = |rows| {
        let room = Room { rows, sequences: rows, positions: 1024 };
        place_rows(&toy.graph(), "toy", toy.precision, toy.context, &target, &candidate, room).expect("a schedule")
    };
    let shared = |schedule: &Schedule| {
        let grids = (0..schedule.program.grids.len()).map(GridId::from);
        let variants = grids.filter_map(|grid| Some((grid, schedule.matvec_variant(grid)?.shared)));
        let (yes, no): (Vec<_>, Vec<_>) = variants.partition(|(_, shared)| *shared);
        (yes.len(), no.into_iter().map(|(grid, _)| grid).collect::<Vec<GridId>>())
    };
    assert_eq!(shared(&placed(8)).0, 0);
    for rows in [8, 16] {
        let schedule = placed(rows);
        assert_eq!(check(&schedule, &target), [], "{rows} rows");
        let (count, alone) = shared(&schedule);
        assert!(!alone.is_empty() && (rows == 8 || count > 1), "{rows} rows: {count} share, {alone:?} do not");
        for grid in alone {
            let mut mutant = schedule.clone();
            let Some(Variant::MatVec(variant)) = mutant.variants.get_mut(&grid) else { panic!("a matvec") };
            variant.shared = true;
            let violations = check(&mutant, &target);
            let named = |v: &Violation| (v.rule, v.entity) == (Rule::Variant, Entity::Grid(grid));
            assert!(
                violations.len() == 1 && violations.iter().all(named),
                "{rows} rows, {grid}: {}",
                listed(&violations)
            );
        }
    }
}

/// The kernel for one row supports one size of pages, all tables or none, packets only, and a limit of registers of a thread.
fn knows_one_size_of_pages(mut paged: Schedule, target: &Target) {
    let refused = |schedule: &Schedule, rule: Rule, message: &str| {
        let violations = check(schedule, target);
        let found = violations.iter().any(|v| v.rule == rule && v.message.contains(message));
        assert!(found, "{message}: {}", listed(&violations));
    };
    let mut other = paged.clone();
    let last = other.program.buffers.iter_mut().rfind(|buffer| buffer.paging.is_some()).unwrap();
    last.rows *= 2;
    last.paging.as_mut().unwrap().rows *= 2;
    refused(&other, Rule::Table, "rows by that table, found");
    let mut other = paged.clone();
    other.program.buffers.iter_mut().rfind(|buffer| buffer.paging.is_some()).unwrap().paging = None;
    refused(&other, Rule::KernelRows, "as the other caches have them, found 0");
    let mut other = paged.clone();
    other.machine.loader_registers = 24;
    // The proof of registers refuses it first on a target without room for more a thread.
    assert!(check(&other, target).iter().any(|v| matches!(v.rule, Rule::KernelRows | Rule::Registers)));
    paged.program.tables.remove(0);
    paged.program.buffers.iter_mut().filter_map(|b| b.paging.as_mut()).for_each(|paging| paging.table.0 -= 1);
    paged.program.tables[1].rows = 1;
    refused(&paged, Rule::KernelRows, "expected a table of sequences beside the others, found none");
}

/// No format is refused for a number of rows: if a record has room for steps of these rows with values, it has room for them with codes
/// of every format that its kernels for one row support.
#[test]
fn every_format_in_rows_on_every_record() {
    let config = include_str!("../../manifests/configs/smollm2-135m.json");
    let mut imported = import_config_only(config, 0).unwrap();
    imported.graph.layers.truncate(2);
    let plain = imported.graph.clone();
    let place = |graph: &ModelGraph, precision: Precision, target: &Target, rows: u32| {
        let base = Candidate::default_for(graph, target, precision);
        let room = Room { rows, sequences: rows, positions: 2048 };
        place_rows(graph, "rows", precision, 512, target, &base, room)
    };
    let mut count = BTreeMap::new();
    for (name, format) in NAMED.into_iter().filter(|(_, format)| !format.is_plain()) {
        let graph = rounded(import_config_only(config, 0).unwrap(), &all(format)).graph;
        let graph = ModelGraph { layers: graph.layers[..2].to_vec(), ..graph };
        for target in Target::builtin_names().filter_map(Target::builtin).filter(|t| t.kind == TargetKind::Cuda) {
            for precision in [BF16, FP32] {
                for &rows in kernel_rows(&graph, precision, &target) {
                    let one = Candidate::default_for(&graph, &target, precision);
                    let program = lower(&graph, "one", precision, 512, &one).unwrap();
                    if schedule(program, &target, &one).is_err() || place(&plain, precision, &target, rows).is_err() {
                        continue;
                    }
                    let placed = place(&graph, precision, &target, rows);
                    let placed = placed.unwrap_or_else(|e| panic!("{name}, {rows} rows, {}: {e}", target.name));
                    let violations = check(&placed, &target);
                    assert!(violations.is_empty(), "{name}, {rows} rows, {}: {}", target.name, listed(&violations));
                    *count.entry(name).or_insert(0) += 1;
                }
            }
        }
    }
    // A T4 has room for steps of 8 rows alone. Codes of 4 bits have no kernels with fp32 activations.
    let eight_bit = |name: &str| matches!(name, "int8" | "fp8");
    for (name, count) in count {
        assert_eq!(count, if eight_bit(name) { 38 } else { 19 }, "{name}");
    }
}

#[test]
fn every_checkpoint_on_every_record() {
    let names = ["families", "variants"].map(checkpoints).concat();
    let mut count = 0;
    for name in &names {
        let imported = import(&fixture(name)).unwrap();
        for context_max in [512, 1] {
            count += proven_on_every_record(&imported.graph, name, context_max).0;
        }
    }
    // Every record has room for every one of them, in three precisions.
    assert_eq!(count, names.len() * 2 * Target::builtin_names().count() * 3);
}

#[test]
fn every_synthetic_shape_on_every_record() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/configs");
    let mut without_room = vec![];
    for entry in std::fs::read_dir(root).expect("configs") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a config");
        let imported = import_config_only(&text, 0).expect("a shape that we ship");
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        without_room.extend(proven_on_every_record(&imported.graph, name, 4096).1);
    }
    // Two chunks of sixteen rows of a head of 256 take a quarter of a T4's shared memory, and what an MLP of 14336 or attention of 12288
    // stages nearly half of it.
    without_room.sort();
    assert_eq!(
        without_room,
        [
            "gemma-3-1b on t4",
            "glm-4.5-air on t4",
            "llama-3.1-8b on t4",
            "mixtral-8x7b on t4",
            "qwen3.6-27b on t4",
            "qwen3.6-35b-a3b on t4"
        ]
    );
}
