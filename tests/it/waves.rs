//! Tests plans of waves: which models have one, that a wrong one has no proof, and that a proven one computes its model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use computed::executor::{Executor, First, Row, Rows, TOLERANCE, cached_by, difference, execute, expected};
use computed::oracle::waves::works;
use monobloc::candidate::Candidate;
use monobloc::codegen::abi;
use monobloc::codegen::emit::Trace;
use monobloc::codegen::waves::{self, SHARES_HELD, WaveTables, emit, encode};
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::format::{Code, Format, FormatPlan, NAMED, ScaleCode};
use monobloc::ir::layout::held;
use monobloc::ir::op::{Attention, Epilogue, Op, Role};
use monobloc::ir::program::{Grid, Program, Space};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::variant::swizzled_piece;
use monobloc::ir::{BufferId, GridId};
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::model::graph::{ModelGraph, QkNormSpan, Tensor, TensorId};
use monobloc::model::weights::{Checkpoint, Weights};
use monobloc::pack::pack;
use monobloc::random::Random;
use monobloc::reference::{Session, argmax};
use monobloc::rows::Shape;
use monobloc::target::Target;
use monobloc::validate::{Entity, Rule, Validated, Violation, validate};
use monobloc::waves::parse::parse;
use monobloc::waves::{
    Action, Division, DivisionId, Form, Input, Layout, NormOf, Over, Plan, Products, Proven, Refused, Ring, Share,
    Slots, Splits, Sum, Sums, Target as Written, Warps, Wave, WithTail, Work, WorkId, derive, derive_alike,
    derive_ragged, derive_split, next_chunk, parts_of, prove, prove_alike, prove_tail,
};

use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::formats::{all, named, rounded};
use crate::nvrtc::{compiles, nvrtc, quick};
use crate::proof_support::{BF16, FP32, TOY, Toy};
use crate::skipped;
use crate::support::{checkpoints, dense_configs, fixture};

fn h200() -> Target {
    Target::builtin("h200").unwrap()
}

/// The batch kernel for 8 rows whose pack and pages a wave kernel shares.
pub fn kernel(graph: &ModelGraph, target: &Target) -> Validated {
    kernel_in(graph, target, BF16)
}

fn kernel_in(graph: &ModelGraph, target: &Target, precision: Precision) -> Validated {
    kernel_up_to(512, graph, target, precision)
}

/// Contexts of up to `context_max` positions.
fn kernel_up_to(context_max: u32, graph: &ModelGraph, target: &Target, precision: Precision) -> Validated {
    let base = Candidate::default_for(graph, target, precision);
    let room = Room { rows: 8, sequences: 8, positions: 4096 };
    let placed = place_rows(graph, "waves", precision, graph.positions_max.min(context_max), target, &base, room);
    let placed = placed.unwrap_or_else(|reason| panic!("{} on {}: {reason}", graph.family, target.name));
    validate(placed, target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// Columns of rows at which products have enough chunks to hold four of them.
const HOLDING_COLS: u32 = 640;

/// Columns of rows that end inside a chunk of the input of tiles.
pub const TILES_COLS: u32 = 704;

/// The config of a fixture with heads that tensor cores take, and random weights.
pub fn wide(name: &str) -> Imported {
    of_width(name, 128)
}

/// The same with rows of this many columns.
fn of_width(name: &str, hidden: u32) -> Imported {
    of_size(name, hidden, None)
}

/// The same with an MLP whose units fill tiles of each SM of `small`: gated ones with 576 columns within.
pub fn filling(name: &str) -> Imported {
    of_size(name, 384, Some(576))
}

/// The same with rows of `hidden` columns, and `within` columns within an MLP.
pub fn of_size(name: &str, hidden: u32, within: Option<u32>) -> Imported {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let own = config["head_dim"].is_u64();
    let (heads, kv) = if own { (6, 2) } else { (2, 1) };
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", within.unwrap_or_else(|| config["intermediate_size"].as_u64().unwrap_or(0) as u32)),
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv),
        ("head_dim", 64),
        ("max_position_embeddings", 512),
    ] {
        if config[key].is_u64() {
            config[key] = value.into();
        }
    }
    let config = config.to_string();
    import_config_only(&config, 7).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The values of all tensors as the weights of a folder, each tensor by the name that `name_of` gives.
fn write_values(imported: &Imported, folder: &Path, name_of: impl Fn(TensorId, &Tensor) -> String) {
    let bytes = |id: TensorId| -> Vec<u8> {
        let mut row = vec![0.0f32; imported.weights.cols(id)];
        let mut bytes = vec![];
        for r in 0..imported.weights.rows(id) {
            imported.weights.read_row_f32(id, r, &mut row);
            bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        bytes
    };
    let tensors: Vec<_> =
        (0..).map(TensorId).zip(&imported.graph.tensors).map(|(id, t)| (name_of(id, t), t, bytes(id))).collect();
    let views = tensors.iter().map(|(name, tensor, bytes)| {
        let shape = tensor.shape.iter().map(|n| *n as usize).collect();
        (name, TensorView::new(Dtype::F32, shape, bytes).unwrap())
    });
    fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The same with its weights in a file, because reading them again is faster than generating random weights again.
pub fn stored(imported: &Imported) -> (tempfile::TempDir, Imported) {
    let folder = tempfile::tempdir().unwrap();
    write_values(imported, folder.path(), |_, tensor| tensor.name.clone());
    fs::write(folder.path().join("config.json"), &imported.config_text).unwrap();
    let imported = import(folder.path()).unwrap_or_else(|error| panic!("{error}"));
    (folder, imported)
}

/// The values to which its weights are rounded, in a file: a session reads all weights for each token, and would round them each time.
pub fn values_of(imported: &Imported) -> (tempfile::TempDir, Weights) {
    let folder = tempfile::tempdir().unwrap();
    // A rounded copy has the name of its tensor.
    let name_of = |id: TensorId, tensor: &Tensor| format!("{id} {}", tensor.name);
    write_values(imported, folder.path(), name_of);
    let named = |(id, tensor): (TensorId, &Tensor)| Tensor {
        name: name_of(id, tensor),
        dtype: DType::F32,
        shape: tensor.shape.clone(),
    };
    let tensors: Vec<Tensor> = (0..).map(TensorId).zip(&imported.graph.tensors).map(named).collect();
    let checkpoint = Checkpoint::open(folder.path()).unwrap_or_else(|errors| panic!("{errors:?}"));
    let weights = checkpoint
        .bind(&tensors, BTreeMap::new(), BTreeMap::new(), &BTreeSet::new())
        .unwrap_or_else(|error| panic!("{error}"));
    (folder, weights)
}

/// An H200 with few SMs, so that a share has more than one unit.
pub fn small() -> Target {
    let mut target = h200();
    target.spec.sm_count = 12;
    target
}

/// A plan that was derived, and its proof. A tail is proven after chunks of 256 rows.
pub fn proven<'a>(validated: &'a Validated, target: &Target, form: Form, rows: u32) -> Result<Proven<'a>, Refused> {
    if form == Form::Tail {
        return Ok(with_tail(validated, target, 256, rows)?.tail().clone());
    }
    let plan = derive(validated.schedule(), target, form, rows)?;
    Ok(prove(plan, validated, target).unwrap_or_else(|violations| panic!("{}", listed(&violations))))
}

/// A proven plan of chunks of `chunk` rows with a tail of `rows` rows.
pub fn with_tail<'a>(
    validated: &'a Validated,
    target: &Target,
    chunk: u32,
    rows: u32,
) -> Result<WithTail<'a>, Refused> {
    let tail = derive(validated.schedule(), target, Form::Tail, rows)?;
    let chunk = proven(validated, target, Form::Chunk, chunk)?;
    Ok(prove_tail(tail, chunk, target).unwrap_or_else(|violations| panic!("{}", listed(&violations))))
}

/// The same of steps with KV splits of `split` positions.
pub fn proven_in_splits<'a>(validated: &'a Validated, target: &Target, rows: u32, split: u32) -> Proven<'a> {
    let plan = derive_split(validated.schedule(), target, rows, split).unwrap();
    prove(plan, validated, target).unwrap_or_else(|violations| panic!("{}", listed(&violations)))
}

/// Why the batch kernel of a model has no such plan.
pub fn refusal(imported: &Imported, target: &Target, form: Form, rows: u32) -> String {
    proven(&kernel(&imported.graph, target), target, form, rows).unwrap_err().to_string()
}

/// A changed plan breaks this rule.
#[track_caller]
pub fn breaks(of: &Proven<'_>, target: &Target, name: &str, rule: &str, change: &dyn Fn(&mut Plan)) {
    let mut plan = of.plan().clone();
    change(&mut plan);
    assert!(plan != *of.plan(), "{name}");
    let violations = prove(plan, of.validated(), target).err().unwrap_or_else(|| panic!("{name}: proven"));
    assert!(violations.iter().any(|violation| violation.rule.name() == rule), "{name}: {violations:?}");
}

/// NVRTC, if it is there, compiles the kernel of a form, whose text has `parts`.
pub fn form_compiles(
    nvrtc: Option<&'static Nvrtc>,
    validated: &Validated,
    target: &Target,
    (form, rows): (Form, u32),
    parts: &[&str],
) {
    let source = emit(&proven(validated, target, form, rows).unwrap(), target, Trace::Off);
    assert!(parts.iter().all(|part| source.text.contains(part)), "{parts:?}: {}", source.text);
    let name = &validated.schedule().program.name;
    nvrtc.into_iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, &format!("{name}: {form:?} of {rows}")));
}

/// Why there is no plan, with the first layer's name: a tail has only the last layer.
fn of_first_layer(refused: &Refused) -> String {
    (1..9).fold(refused.to_string(), |text, layer| text.replace(&format!(".{layer}`"), ".0`"))
}

pub fn listed(violations: &[Violation]) -> String {
    violations.iter().map(|violation| format!("{violation}\n")).collect()
}

/// Every form of a launch.
const FORMS: [(Form, u32); 5] =
    [(Form::Chunk, 512), (Form::Steps, 16), (Form::Steps, 32), (Form::Steps, 64), (Form::Tail, 16)];

/// A line about each plan of a model, or why there is none. A model with a plan of chunks also has all plans of steps, and a tail unless it ends with a state.
fn decided(name: &str, graph: &ModelGraph) -> String {
    let target = h200();
    let validated = kernel(graph, &target);
    let [chunk, few, some, many, tail] = FORMS;
    let forms = [chunk, few, some, many, (Form::Steps, 128), tail];
    let plans = forms.map(|(form, rows)| proven(&validated, &target, form, rows));
    if let Err(refused) = &plans[0] {
        let (tail, others) = plans.split_last().unwrap();
        assert!(others.iter().all(|plan| plan.as_ref().err() == Some(refused)) && tail.is_err(), "{name}: {refused}");
        return format!("{name}: {refused}\n");
    }
    let mut lines = String::new();
    for ((form, rows), plan) in forms.into_iter().zip(plans) {
        let plan = match plan {
            Ok(plan) => plan,
            // A model that ends with a state.
            Err(refused) if form == Form::Tail && graph.has_state() => {
                lines += &format!("{name}: {form:?} of {rows}: {refused}\n");
                continue;
            }
            Err(refused) => panic!("{name}, {form:?} of {rows}: {refused}"),
        };
        let (plan, ring) = (plan.plan(), |ring: Ring| format!("{}x{}", ring.slots, ring.slot_bytes));
        let in_parts = plan.divisions.iter().filter(|division| matches!(division.over, Over::Units { parts: 2.., .. }));
        let products = plan.divisions.iter().filter(|division| matches!(division.over, Over::Units { .. }));
        let tile = |wave: &Wave| match wave.action {
            Action::Attend { tile, .. } | Action::AttendRow { tile, .. } => Some(tile),
            _ => None,
        };
        lines += &format!(
            "{name}: {form:?} of {rows}: {} waves, weights {}, inputs {}, {} of {} divisions in parts",
            plan.waves.len(),
            ring(plan.machine.weights),
            ring(plan.machine.inputs),
            in_parts.count(),
            products.count()
        );
        if let Some(tile) = plan.waves.iter().find_map(tile) {
            lines += &format!(", attention in tiles of {tile}");
        }
        if plan.waves.iter().any(|wave| matches!(wave.action, Action::Attend { wide: true, .. })) {
            lines += " by warpgroups";
        }
        let holding = plan.waves.iter().filter(|wave| wave.action.held() > 0).count();
        for (count, what) in [(holding, "waves with held weights"), (tile_waves(plan).len(), "waves of tiles")] {
            lines += &if count > 0 { format!(", {count} of {} {what}", plan.waves.len()) } else { String::new() };
        }
        lines += "\n";
    }
    lines
}

/// The waves that warpgroups of a step multiply in tiles.
fn tile_waves(plan: &Plan) -> Vec<usize> {
    let is_tiles = |w: &usize| plan.waves[*w].action.is_tiles();
    (0..plan.waves.len()).filter(is_tiles).collect()
}

fn blessed(name: &str, found: &str) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it").join(name);
    if std::env::var_os("BLESS").is_some() {
        fs::write(&golden, found).unwrap();
    }
    let expected = fs::read_to_string(&golden).unwrap();
    for (found, expected) in found.lines().zip(expected.lines()) {
        assert_eq!(found, expected, "{name}; `BLESS=1` writes what is found");
    }
    assert_eq!(found.lines().count(), expected.lines().count(), "{name}; `BLESS=1` writes what is found");
}

/// Of five pairs of SMs and two pairs of row blocks, the fifth one takes the last 24 of each 128 units.
#[test]
fn pairs_that_are_left_take_the_last_units_of_every_share() {
    let mut target = small();
    target.spec.sm_count = 10;
    let validated = kernel(&of_size("families/llama-gqa", 128, Some(1024)).graph, &target);
    let proven = proven(&validated, &target, Form::Chunk, 512).unwrap();
    let gate_up = proven.plan().divisions.iter().find(|division| matches!(division.over, Over::Units { n: 256, .. }));
    let of_sms = |blocks: usize| {
        let of_sm = |shares: &Vec<Share>| shares.iter().map(|share| share.hi - share.lo).collect::<Vec<_>>();
        gate_up.unwrap().shares[blocks - 1].iter().map(of_sm).collect::<Vec<_>>()
    };
    let (most, left) = (vec![104; 1], vec![24; 4]);
    assert_eq!(of_sms(4), [vec![most; 8], vec![left; 2]].concat());
    // With one pair of row blocks none is left.
    assert_eq!(of_sms(2).concat().into_iter().max(), Some(52));
}

/// A model that loses or gains a kernel changes this file; `BLESS=1` writes it again.
#[test]
fn wave_plans_match_golden() {
    let mut found = String::new();
    for path in dense_configs() {
        let imported = import_config_only(&fs::read_to_string(&path).unwrap(), 0).unwrap();
        let name = path.file_stem().unwrap().display().to_string();
        found += &decided(&name, &imported.graph);
        // Granules of 128 of k, and heads of 128.
        if name == "qwen3-0.6b" {
            found += &decided(&format!("{name} in int4"), &rounded(imported, &all(named("int4:128"))).graph);
        }
    }
    for name in [vec!["tinystories-llama".to_string()], checkpoints("families"), checkpoints("variants")].concat() {
        found += &decided(&name, &import(&fixture(&name)).unwrap().graph);
    }
    let variants = ["cohere", "cohere-qk-norm", "cohere2", "gemma", "gemma-bias", "gemma2-softcap", "gemma3-v4"];
    let more =
        ["gpt-neox-sequential", "granite-bias", "llama-one-position", "ministral", "olmo2-bias", "qwen3-bias-swa"];
    let last = ["smollm3-window", "stablelm-parallel", "starcoder2-window"];
    let variants = variants.iter().chain(&more).chain(&last).map(|name| format!("variants/{name}"));
    for name in checkpoints("families").into_iter().chain(variants) {
        found += &decided(&format!("{name} with heads of 64"), &wide(&name).graph);
    }
    blessed("waves_models.txt", &found);
}

/// The text of plans of the smallest models that together have every kind of wave.
#[test]
fn the_text_of_a_plan_is_what_it_was() {
    let target = h200();
    let of = |name: &str, form, rows| {
        let validated = kernel(&wide(name).graph, &target);
        proven(&validated, &target, form, rows).unwrap().plan().to_string()
    };
    blessed("waves_plan.txt", &of("families/gemma3", Form::Chunk, 512));
    // Branches with their own norms, and products that add to the residual.
    let steps = of("families/gemma3", Form::Steps, 32) + &of("families/qwen3", Form::Steps, 32);
    // Tiles, of units of their own and of shared k, after products that add.
    let imported = rounded(filling("families/qwen3"), &all(named("int4:32")));
    let validated = kernel(&imported.graph, &small());
    let steps = steps + &proven(&validated, &small(), Form::Steps, 32).unwrap().plan().to_string();
    // On few SMs, products of whole units hold weights.
    let validated = kernel(&of_width("families/qwen3", HOLDING_COLS).graph, &small());
    let holding = proven(&validated, &small(), Form::Steps, 16).unwrap().plan().to_string();
    blessed("waves_plan_steps.txt", &(steps + &holding));
    // Histories in KV splits.
    let validated = kernel(&wide("families/qwen3").graph, &target);
    let splits = proven_in_splits(&validated, &target, 32, 128);
    blessed("waves_plan_splits.txt", &splits.plan().to_string());
    // After a branch with a norm, after a product that adds, and after the embedding.
    let tails: String = ["families/gemma3", "families/qwen3"].map(|name| of(name, Form::Tail, 16)).concat();
    let one_layer = Toy { layers: 1, heads: 2, kv_heads: 1, dim: 64, ..TOY }.graph();
    let validated = kernel(&one_layer, &target);
    let tail = proven(&validated, &target, Form::Tail, 16).unwrap();
    blessed("waves_plan_tail.txt", &(tails + &tail.plan().to_string()));
}

/// Each block finds its own shares, for every number of blocks of rows, by the lookup of `Shares` in waves/context.cuh.
#[test]
fn tables_hold_the_shares_of_a_plan() {
    let (imported, target) = (wide("families/gemma3"), small());
    let validated = kernel(&imported.graph, &target);
    for (form, rows) in FORMS {
        tables_hold_shares(&proven(&validated, &target, form, rows).unwrap());
    }
    tables_hold_shares(&proven_in_splits(&validated, &target, 32, 64));
}

/// Tensor maps of weights are those that a driver makes, and boxes are of whole passes of the matrix of their wave.
fn boxes_hold_their_matrices(proven: &Proven<'_>, tables: &WaveTables) {
    let schedule = proven.validated().schedule();
    let mut boxed = 0;
    for (wave, entry) in proven.plan().waves.iter().zip(&tables.waves) {
        let grid = &schedule.program.grids[wave.grid.index()];
        let (Action::MatMul { pass, chunk, .. }, Op::MatVec(m)) = (&wave.action, &grid.op) else { continue };
        let format = schedule.program.format_of(grid);
        let piece_bytes = chunk * format.granule_bytes();
        if piece_bytes > 2048 {
            assert_eq!(entry.branch_bias, u32::MAX, "long pieces are copied one by one");
            continue;
        }
        let first = entry.branch_bias as usize;
        let shared = proven.plan().machine.products == Products::Shared;
        let units = if shared { vec![8] } else { vec![*pass, (pass - 1).max(1), 8] };
        let boxes = &tables.boxes[first..first + units.len()];
        assert_eq!(boxes.iter().map(|of| of.box_units).collect::<Vec<_>>(), units);
        let granules = m.k.div_ceil(format.granule_k() * m.parts());
        for of in boxes {
            assert_eq!((of.piece_bytes, of.units), (piece_bytes, m.units().into()));
            assert_eq!(of.unit_bytes, u64::from(granules * format.granule_bytes()));
            assert_eq!(of.place, u64::from(entry.weight) * 256);
            assert_eq!(of.line_bytes, if shared { 64 } else { 0 });
            assert!(of.unit_bytes.is_multiple_of(16) && of.piece_bytes.is_multiple_of(16) && of.box_units <= 256);
        }
        boxed += 1;
    }
    assert!(boxed > 0);
}

fn tables_hold_shares(proven: &Proven<'_>) {
    let (plan, tables) = (proven.plan(), encode(proven, 0));
    let (divisions, sms) = (plan.divisions.len(), plan.machine.sms as usize);
    assert_eq!(tables.records.len(), (plan.rows / plan.block_rows) as usize * divisions * sms);
    let share = |s: &waves::Share| Share { row: s.row, rows: s.rows, lo: s.lo, hi: s.hi };
    for (d, division) in plan.divisions.iter().enumerate() {
        for (blocks, of_sms) in division.shares.iter().enumerate() {
            for (sm, shares) in of_sms.iter().enumerate() {
                let at = (blocks * divisions + d) * sms + sm;
                let record = &tables.records[at];
                let (first, count) = (record.first as usize, record.count as usize);
                let found: Vec<Share> = tables.shares[first..first + count].iter().map(share).collect();
                assert_eq!(found, *shares);
                // The first ones are in the record, too.
                let held: Vec<Share> = record.held.iter().take(count).map(share).collect();
                assert_eq!(held, shares[..count.min(SHARES_HELD)]);
            }
        }
    }
    boxes_hold_their_matrices(proven, &tables);
    let next = tables.waves.iter().cycle().skip(1);
    for ((wave, entry), next) in plan.waves.iter().zip(&tables.waves).zip(next) {
        assert_eq!((wave.division.0, next.division), (entry.division, entry.next_division));
        assert_eq!(next.op, entry.next_op);
    }
}

/// Both norms, heads with norms and windows; biases, LayerNorm and plain activations; with and without time stamps. On all cores, here and in the
/// next test: these are among the last tests, when others no longer keep the cores busy.
#[test]
fn kernels_of_waves_compile() {
    let Some(nvrtc) = nvrtc("kernels_of_waves_compile") else { return };
    let quick = quick(nvrtc);
    // Each form is compiled once as users have it.
    let kernels = [
        ("families/gemma3", "h200", Trace::On, FORMS[0], nvrtc),
        ("families/starcoder2", "b200", Trace::Off, FORMS[0], nvrtc),
        ("families/gemma3", "h200", Trace::Off, FORMS[2], nvrtc),
        ("families/gemma3", "h200", Trace::Off, FORMS[3], quick),
        ("families/qwen3", "h100", Trace::On, FORMS[1], nvrtc),
        ("families/starcoder2", "b200", Trace::Off, FORMS[3], nvrtc),
        ("families/gemma3", "h200", Trace::Off, FORMS[4], quick),
        ("families/qwen3", "h100", Trace::Off, FORMS[4], quick),
        ("families/starcoder2", "b200", Trace::On, FORMS[4], nvrtc),
    ];
    kernels.into_par_iter().for_each(|(name, record, trace, (form, rows), compiler)| {
        let target = Target::builtin(record).unwrap();
        let validated = kernel(&wide(name).graph, &target);
        let source = emit(&proven(&validated, &target, form, rows).unwrap(), &target, trace);
        compiles(compiler, &source, &format!("{name} on {record}"));
    });
    // Steps of 32 rows that hold weights, and of 64 rows in tiles, as users have them; and of 128 rows in tiles.
    let holding = kernel(&of_width("families/gemma3", HOLDING_COLS).graph, &small());
    let holding = emit(&proven(&holding, &small(), Form::Steps, 32).unwrap(), &small(), Trace::On);
    assert!(holding.text.contains("int HELD = 4;"));
    let filled = kernel(&filling("families/qwen3").graph, &small());
    let [tiles, most] = [64, 128].map(|rows| {
        let tiles = emit(&proven(&filled, &small(), Form::Steps, rows).unwrap(), &small(), Trace::On);
        assert!(tiles.text.contains("bool TILES = true;"));
        tiles
    });
    [(holding, nvrtc), (tiles, nvrtc), (most, quick)]
        .par_iter()
        .for_each(|(source, compiler)| compiles(compiler, source, "a kernel that holds weights, or of tiles"));
    // Histories in KV splits.
    for (record, trace, rows, compiler) in [("h200", Trace::On, 64, nvrtc), ("b200", Trace::Off, 128, quick)] {
        let target = Target::builtin(record).unwrap();
        let validated = kernel(&wide("families/gemma3").graph, &target);
        let splits = proven_in_splits(&validated, &target, rows, 64);
        compiles(compiler, &emit(&splits, &target, trace), &format!("splits on {record}"));
    }
}

/// Scales of groups, of groups with zero points, and of rows.
#[test]
fn kernels_of_waves_of_codes_compile() {
    let Some(nvrtc) = nvrtc("kernels_of_waves_of_codes_compile") else { return };
    let quick = quick(nvrtc);
    let zeros = Format::by_group(Code::Int4, 128, ScaleCode::F16, true);
    // Each format is compiled once as users have it, in chunks or in steps.
    let kernels = [
        (named("int4:32"), "h200", FORMS[0], nvrtc),
        (zeros, "h100", FORMS[0], quick),
        (named("fp8"), "h200", FORMS[0], quick),
        (named("mxfp4"), "b200", FORMS[0], nvrtc),
        (named("int4:32"), "tiles", FORMS[2], quick),
        (zeros, "tiles", FORMS[2], nvrtc),
        (zeros, "h100", FORMS[1], nvrtc),
        (named("fp8"), "h200", FORMS[3], nvrtc),
        (named("int4:32"), "h200", FORMS[4], quick),
        (named("mxfp4"), "b200", FORMS[4], quick),
        (named("int4:32"), "h200", (Form::Steps, 128), quick),
    ];
    kernels.into_par_iter().for_each(|(format, record, (form, rows), compiler)| {
        let (target, model) = match record {
            "tiles" => (small(), filling("families/llama-gqa")),
            _ => (Target::builtin(record).unwrap(), wide("families/llama-gqa")),
        };
        let plan =
            FormatPlan { embed: Some(format).filter(|format| !format.groups.is_some_and(|g| g.zeros)), ..all(format) };
        let coded = rounded(model, &plan);
        let validated = kernel(&coded.graph, &target);
        let source = emit(&proven(&validated, &target, form, rows).unwrap(), &target, Trace::Off);
        compiles(compiler, &source, &format!("{format} on {record}"));
    });
}

#[test]
fn targets_that_cannot_are_refused_by_name() {
    let graph = wide("families/llama-gqa").graph;
    // A plan can be derived from any schedule, so that of an H200 suffices.
    let validated = kernel(&graph, &h200());
    let plan = derive(validated.schedule(), &h200(), Form::Chunk, 512).unwrap();
    let mut can = vec![];
    for name in Target::builtin_names() {
        let target = Target::builtin(name).unwrap();
        let refused = |(form, rows)| derive(validated.schedule(), &target, form, rows).err();
        let all = FORMS.map(refused);
        assert!(all.iter().all(|refused| *refused == all[0]), "{name}: {all:?}");
        match derive(validated.schedule(), &target, Form::Chunk, 512) {
            Err(Refused::Target { target, .. }) => assert_eq!(target, name),
            Err(Refused::SharedMemory { target, .. }) => assert_eq!(target, name),
            Err(other) => panic!("{name}: {other}"),
            Ok(_) => can.push(name),
        }
        // The same record with the name that the plan has.
        let capable = can.last() == Some(&name);
        let renamed = Target { name: plan.machine.target.clone(), ..target };
        let rules = prove(plan.clone(), &validated, &renamed).err().unwrap_or_default();
        assert!(capable || rules.iter().any(|violation| violation.rule == Rule::Machine), "{name}: {rules:?}");
    }
    assert_eq!(can, ["h100", "h200", "b200"]);
    for name in ["a100", "t4", "l4", "cpu"] {
        let refused = derive(validated.schedule(), &Target::builtin(name).unwrap(), Form::Chunk, 512);
        assert_eq!(refused.unwrap_err().to_string(), format!("target `{name}` has no bulk copies or no tensor cores"));
    }
}

#[test]
fn steps_of_other_numbers_of_rows_are_refused() {
    let validated = kernel(&wide("families/llama-gqa").graph, &h200());
    for rows in [0, 1, 8, 15, 17, 24, 48, 63, 65, 96, 127, 129, 256, u32::MAX] {
        let refused = derive(validated.schedule(), &h200(), Form::Steps, rows).unwrap_err().to_string();
        assert_eq!(refused, format!("steps of {rows} rows: expected whole tiles of 16, up to 128"));
    }
}

#[test]
fn a_cache_in_fp8_has_no_plan() {
    let precision = Precision { cache: DType::E4m3, ..BF16 };
    let validated = kernel_in(&wide("families/llama-gqa").graph, &h200(), precision);
    for (form, rows) in FORMS {
        let refused = of_first_layer(&derive(validated.schedule(), &h200(), form, rows).unwrap_err());
        assert_eq!(refused, "the cache of `attn.0`: expected keys and values in bf16");
    }
}

/// Weights that have to be converted for tensor cores.
#[test]
fn every_format_of_codes_has_a_plan_and_fp32_has_none() {
    let wider = kernel_in(&wide("families/llama-gqa").graph, &h200(), FP32);
    for (form, rows) in FORMS {
        let refused = derive(wider.schedule(), &h200(), form, rows).unwrap_err();
        assert_eq!(of_first_layer(&refused), "weights of `qkv.0`: expected bf16, or codes");
    }
    let formats: Vec<_> = NAMED.into_iter().filter(|(_, format)| !format.is_plain()).collect();
    assert!(formats.len() > 4);
    for (name, format) in formats {
        let coded = rounded(wide("families/llama-gqa"), &all(format));
        let validated = kernel(&coded.graph, &h200());
        for (form, rows) in FORMS {
            let plan = proven(&validated, &h200(), form, rows);
            plan.unwrap_or_else(|refused| panic!("{name}, {form:?} of {rows}: {refused}"));
        }
        let proven = proven(&validated, &h200(), Form::Chunk, 512).unwrap();
        assert_eq!(proven.plan().machine.products, Products::Warpgroups, "{name}");
        // Sums of groups take more registers, so passes are shorter, and a pass with the units of plain weights is refused.
        let mut plan = proven.plan().clone();
        for wave in &mut plan.waves {
            if let Action::MatMul { pass, warps, .. } = &mut wave.action {
                (*pass, *warps) = (32, Warps { rows: 1, units: 8, k: 1 });
                wave.boxes.clear();
            }
        }
        plan.machine.weights = Ring { slots: 2, slot_bytes: 64 << 10 };
        let judged = prove(plan, &validated, &h200());
        assert_eq!(judged.is_err(), format.groups.is_some(), "{name}");
    }
}

/// A prompt has chunks of nearly the same length, of whole blocks of rows but for the last one.
#[test]
fn chunks_of_a_prompt_are_nearly_as_long() {
    let chunks = |tokens: u32, most: u32| {
        let mut left = tokens;
        let all = std::iter::from_fn(|| (left > 0).then(|| next_chunk(left, most)).inspect(|count| left -= count));
        all.collect::<Vec<_>>()
    };
    assert_eq!(chunks(2048, 2048), [2048]);
    assert_eq!(chunks(2049, 2048), [1152, 897]);
    assert_eq!(chunks(5000, 2048), [1792, 1664, 1544]);
    assert_eq!(chunks(600, 512), [384, 216]);
    assert_eq!(chunks(100, 64), [64, 36]);
    assert_eq!(chunks(7, 512), [7]);
}

/// Warpgroups take a whole slot of inputs at once, so all matrices of a chunk have granules of the same length in k, or of 64.
#[test]
fn warpgroups_multiply_layers_of_two_formats_where_their_chunks_are_as_long() {
    let layers = |format: &str| FormatPlan { layers: [(0, named(format))].into(), ..all(named("int8")) };
    for (format, products) in
        [("fp8", Products::Warpgroups), ("bf16", Products::Warpgroups), ("int4:128", Products::Warps)]
    {
        let coded = rounded(wide("families/llama-gqa"), &layers(format));
        let validated = kernel(&coded.graph, &h200());
        let proven =
            proven(&validated, &h200(), Form::Chunk, 512).unwrap_or_else(|refused| panic!("{format}: {refused}"));
        assert_eq!(proven.plan().machine.products, products, "int8 and {format}");
    }
}

/// Shapes that no fixture has, on any number of SMs and for chunks of any length.
#[test]
fn every_plan_that_is_derived_is_proven() {
    let mut random = Random::new(11);
    let (mut plans, mut executed, mut refusals) = (0, 0, vec![]);
    for at in 0..600 {
        let mut one_of = |of: &[u32]| of[random.below(of.len())];
        let kv_heads = one_of(&[1, 2, 3]);
        // A parallel layer has no norms after its branches.
        let parallel = one_of(&[0, 0, 0, 1]) == 1;
        let toy = Toy {
            layers: one_of(&[1, 2, 3]),
            hidden: one_of(&[64, 72, 200, 136, 2304, 66]),
            heads: kv_heads * one_of(&[1, 2, 3, 4, 5, 6, 8, 9]),
            kv_heads,
            dim: one_of(&[64, 128, 256, 64, 128, 80]),
            intermediate: one_of(&[32, 36, 98, 128, 1000, 51]),
            context: 512,
            gated: one_of(&[0, 1]) == 1,
            bias: one_of(&[0, 1]) == 1,
            parallel,
            post_norms: !parallel && one_of(&[0, 1]) == 1,
            qk_norm: [None, Some(QkNormSpan::Head), Some(QkNormSpan::Projection)][one_of(&[0, 1, 1, 0, 2]) as usize],
            window: [None, Some(40)][one_of(&[0, 1]) as usize],
            rope: one_of(&[0, 1]) == 1,
            ..TOY
        };
        let mut target = h200();
        target.spec.sm_count = one_of(&[1, 2, 3, 5, 16, 78, 132]);
        let validated = kernel(&toy.graph(), &target);
        let form = [Form::Chunk, Form::Steps, Form::Tail][one_of(&[0, 1, 2]) as usize];
        let rows = match form {
            Form::Chunk => one_of(&[1, 128, 300, 512, 1000]),
            Form::Steps | Form::Tail => one_of(&[16, 32, 64, 128]),
        };
        match proven(&validated, &target, form, rows) {
            Ok(proven) => {
                plans += 1;
                if at % 8 == 0 && toy.hidden < 256 {
                    executed += 1;
                    let graph = toy.graph();
                    let weights = Weights::synthetic(&graph, at);
                    let (header_bytes_read, config_text, notes) = (0, String::new(), vec![]);
                    let imported = Imported { graph, weights, header_bytes_read, config_text, notes };
                    let text = tokens(&imported, 19);
                    let program = &validated.schedule().program;
                    if form == Form::Tail {
                        let both = with_tail(&validated, &target, 256, rows).unwrap();
                        run_tail(&imported, &both, &text, &[19], at);
                        continue;
                    }
                    let found =
                        execute(program, &imported, proven.plan(), &[&text[..7], &text[7..16], &text[16..]], at);
                    let difference = difference(&expected(&imported, &text), &found);
                    assert!(difference < TOLERANCE, "{toy:?}: {difference:e}");
                }
            }
            Err(refused) => refusals.push(of_first_layer(&refused)),
        }
    }
    refusals.sort();
    refusals.dedup();
    let known = [
        "attention of `attn.0`: expected heads that tensor cores take whole",
        "the output of `up.0`: expected an even number of columns",
        "the output of `gate_up.0`: expected an even number of columns",
        "the input of `gate_up.0`: expected a value that is not overwritten; parallel layers have no wave kernel",
        "the input of `up.0`: expected a value that is not overwritten; parallel layers have no wave kernel",
        "the width of `embed`: expected whole pieces of 8 values",
        "the width of `qkv.0`: expected whole pieces of 8 values",
    ];
    for refused in &refusals {
        assert!(known.contains(&refused.as_str()), "{refused}");
    }
    assert!(plans > 200 && executed > 20, "{plans} plans, {executed} executed, else {refusals:#?}");
}

// ---- mutants ----------------------------------------------------------------------------------------------------------

/// A wrong plan: its fault, the rule that must find it if one is obvious, and the plan.
struct Mutant {
    name: String,
    rule: Option<&'static str>,
    plan: Plan,
}

struct Mutants<'a> {
    of: &'a Plan,
    program: &'a Program,
    made: Vec<Mutant>,
}

impl Mutants<'_> {
    fn add(&mut self, name: impl Into<String>, rule: Option<&'static str>, change: impl FnOnce(&mut Plan)) {
        let mut plan = self.of.clone();
        change(&mut plan);
        if plan != *self.of {
            self.made.push(Mutant { name: name.into(), rule, plan });
        }
    }

    fn machine(&mut self, sm_count: u32) {
        let wrong = Some("machine");
        self.add("another target", wrong, |p| p.machine.target += "x");
        for n in [0, sm_count + 1, u32::MAX] {
            self.add(format!("{n} SMs"), wrong, |p| p.machine.sms = n);
        }
        self.add("the largest numbers", wrong, |p| {
            let Plan { machine: m, .. } = p;
            (m.warps, m.loader_warps, m.registers, m.loader_registers) = (u32::MAX, u32::MAX, u32::MAX, u32::MAX);
            let ring = Ring { slots: u32::MAX, slot_bytes: u32::MAX };
            (m.weights, m.inputs, m.scratch_bytes, m.state_bytes) = (ring, ring, u32::MAX, u32::MAX);
        });
        self.add("an SM less", Some("partition"), |p| p.machine.sms -= 1);
        for n in [0, 4, 9, 16, u32::MAX] {
            self.add(format!("{n} warps"), wrong, |p| p.machine.warps = n);
            self.add(format!("{n} loader warps"), wrong, |p| p.machine.loader_warps = n + u32::from(n == 4));
        }
        // Each thread has 168 registers at the launch.
        for (consumers, loaders) in [(216, 80), (224, 72), (220, 72), (160, 72), (0, 72), (u32::MAX, 72), (216, 176)] {
            self.add(format!("{consumers} and {loaders} registers"), wrong, |p| {
                (p.machine.registers, p.machine.loader_registers) = (consumers, loaders);
            });
        }
        for n in [0, 16, 70, u32::MAX] {
            self.add(format!("{n} registers of loaders"), wrong, |p| p.machine.loader_registers = n);
        }
        let rings: [RingOf; 2] = [("weights", |p| &mut p.machine.weights), ("inputs", |p| &mut p.machine.inputs)];
        for (name, ring) in rings {
            let now = *ring(&mut self.of.clone());
            for n in [0, 1, 64, u32::MAX] {
                self.add(format!("{n} slots of {name}"), wrong, |p| ring(p).slots = n);
            }
            for n in [u32::MAX, now.slot_bytes + 64, 256 << 10, 0] {
                self.add(format!("slots of {name} of {n} bytes"), wrong, |p| ring(p).slot_bytes = n);
            }
            self.add(format!("half slots of {name}"), None, |p| ring(p).slot_bytes /= 2);
        }
        let slots = self.of.machine.weights.slots + self.of.machine.inputs.slots;
        // The last one is eight bytes less than the state of a block.
        let of_rows = if self.of.form.decides() { 16 * self.of.rows + 8 } else { 16 };
        let cuts = |wave: &Wave| matches!(wave.action, Action::AttendRow { splits: Some(_), .. });
        let of_splits = if self.of.waves.iter().any(cuts) { 48 } else { 0 };
        for n in [0, 256, u32::MAX, 24 + 16 * slots + 32 * self.of.machine.warps + 344 + of_rows + of_splits] {
            self.add(format!("{n} bytes of state"), wrong, |p| p.machine.state_bytes = n);
        }
        for n in [64, self.of.machine.scratch_bytes + 64, u32::MAX, u32::MAX - 127] {
            self.add(format!("{n} bytes of scratch"), wrong, |p| p.machine.scratch_bytes = n);
        }
        for n in [0, 1, self.of.rows - 1, self.of.rows + 63] {
            self.add(format!("{n} rows"), wrong, |p| p.rows = n);
        }
        let more = if self.of.form == Form::Chunk { "partition" } else { "machine" };
        self.add("a block of rows more", Some(more), |p| p.rows += 128);
        for n in [0, 1, 8, self.of.block_rows / 2, self.of.block_rows * 2, u32::MAX] {
            self.add(format!("blocks of {n} rows"), wrong, |p| p.block_rows = n);
        }
        for form in [Form::Chunk, Form::Steps, Form::Tail] {
            let rule = match (self.of.form, form) {
                (Form::Tail, _) => Some("tail"),
                (_, Form::Chunk) | (Form::Chunk, _) => wrong,
                _ => None,
            };
            self.add(format!("as {form:?}"), rule, |p| p.form = form);
        }
    }

    fn arena(&mut self) {
        let work = &self.of.work;
        for i in 0..work.len() {
            for j in (0..work.len()).filter(|j| *j != i) {
                self.add(format!("a{i} at a{j}"), Some("arena"), |p| p.work[i].place = p.work[j].place);
                self.add(format!("a{i} and a{j} swapped"), None, |p| p.work.swap(i, j));
            }
            let last = work.iter().all(|other| other.place <= work[i].place);
            if !last {
                self.add(format!("a{i} 256 bytes on"), Some("arena"), |p| p.work[i].place += 256);
            }
            self.add(format!("a{i} 16 bytes on"), Some("arena"), |p| p.work[i].place += 16);
            for place in [u64::MAX, u64::MAX - 255, 1 << 40] {
                self.add(format!("a{i} at byte {place}"), Some("arena"), |p| p.work[i].place = place);
            }
            for cols in [0, 1, work[i].cols.wrapping_sub(2), work[i].cols + 1, work[i].cols * 2, u32::MAX] {
                self.add(format!("a{i} of {cols} columns"), None, |p| p.work[i].cols = cols);
            }
            let rows = [DType::F32, DType::Bf16, DType::F16, DType::I32].map(Layout::Rows);
            let more =
                [Layout::Operand, Layout::Tiles, Layout::Best].into_iter().chain([0, 1, 2, 3, 9].map(Layout::Parts));
            let more = more.chain([(0, 1), (9, 1), (9, 8)].map(|(groups, parts)| Layout::Squares { groups, parts }));
            let more = more.chain([0, 1, 2, 3].map(Layout::Packets));
            for layout in rows.into_iter().chain(more) {
                self.add(format!("a{i} as {layout:?}"), None, |p| p.work[i].layout = layout);
            }
        }
    }

    fn order(&mut self) {
        let (waves, wrong) = (&self.of.waves, Some("order"));
        for w in 0..waves.len() {
            self.add(format!("w{w} dropped"), wrong, |p| {
                p.waves.remove(w);
            });
            self.add(format!("w{w} twice"), wrong, |p| p.waves.insert(w, p.waves[w].clone()));
            if w + 1 < waves.len() {
                self.add(format!("w{w} after the next"), wrong, |p| p.waves.swap(w, w + 1));
            }
            self.add(format!("w{w} last"), wrong, |p| {
                let wave = p.waves.remove(w);
                p.waves.push(wave);
            });
            for grid in [waves[w].grid.0.wrapping_sub(1), waves[w].grid.0 + 1, 0, u32::MAX] {
                self.add(format!("w{w} of grid {grid}"), wrong, |p| p.waves[w].grid = GridId(grid));
            }
            for d in 0..self.of.divisions.len() as u32 {
                // A product that adds can be whole, too; that is another order.
                let whole = match (&waves[w].action, self.of.divisions[d as usize].over) {
                    (
                        Action::MatMul { target: Written::Residual(_), then: None, .. },
                        Over::Units { n, parts: 1, .. },
                    ) => {
                        matches!(self.of.divisions[waves[w].division.index()].over, Over::Units { n: of, .. } if of == n)
                    }
                    _ => false,
                };
                let rule = if whole { Some("sums") } else { wrong };
                self.add(format!("w{w} divided as d{d}"), rule, |p| p.waves[w].division = DivisionId(d));
            }
            self.add(format!("w{w} divided as none"), Some("bounds"), |p| p.waves[w].division = DivisionId(99));
        }
        let last = waves.last().expect("waves").clone();
        let attend = waves.iter().find(|wave| matches!(wave.action, Action::Attend { .. }));
        if let (
            Action::Append { queries, .. },
            Some(Wave { action: Action::Attend { out, tile, wide, gate, .. }, division, .. }),
        ) = (last.action.clone(), attend.cloned())
        {
            let action = Action::Attend { queries, out, tile, wide, gate };
            self.add("attention of the last layer", wrong, |p| p.waves.push(Wave { action, division, ..last.clone() }));
        }
        self.add("a wave after the last one, of a buffer that does not exist", wrong, |p| {
            let mut wave = Wave { grid: GridId(last.grid.0 + 1), ..last.clone() };
            *works(&mut wave.action)[0] = WorkId(4000);
            p.waves.push(wave);
        });
        self.add("no waves", wrong, |p| p.waves.clear());
    }

    /// Meetings that are left out, and waves that overwrite what the wave before them still accesses.
    fn meetings(&mut self) {
        for w in 0..self.of.waves.len() {
            let meets = self.of.waves[w].meets;
            let name = if meets { "does not meet" } else { "meets" };
            self.add(format!("w{w} {name}"), meets.then_some("meeting"), |p| p.waves[w].meets = !meets);
            if meets {
                continue;
            }
            self.add(format!("w{w} and the one before do not meet"), Some("meeting"), |p| p.waves[w - 1].meets = false);
            self.add(format!("w{w} and the next one do not meet"), Some("meeting"), |p| p.waves[w + 1].meets = false);
            // The product after it reads what it writes: that could be the input of the product before it, if it were not still read.
            let (Action::MatMul { x: input, .. }, Action::AttendRow { out, .. }) =
                (&self.of.waves[w - 1].action, &self.of.waves[w].action)
            else {
                panic!("packets of no product");
            };
            let (input, out) = (*input, *out);
            let of = |id: WorkId| (self.of.work[id.index()].layout, self.of.work[id.index()].cols);
            if of(input) == of(out) {
                self.add(format!("w{w} overwrites what the one before reads"), Some("meeting"), |p| {
                    for wave in &mut p.waves {
                        works(&mut wave.action).into_iter().filter(|id| **id == out).for_each(|id| *id = input);
                    }
                });
            }
        }
    }

    /// Replaces every buffer that a wave names by another one.
    fn operands(&mut self) {
        let count = self.of.work.len() as u32;
        for w in 0..self.of.waves.len() {
            let named = works(&mut self.of.waves[w].action.clone()).len();
            for at in 0..named {
                for id in (0..count).chain([count, u32::MAX]) {
                    let rule = (id >= count).then_some("bounds");
                    let change = |p: &mut Plan| *works(&mut p.waves[w].action)[at] = WorkId(id);
                    self.add(format!("operand {at} of w{w} is a{id}"), rule, change);
                }
            }
        }
    }

    fn attributes(&mut self) {
        let wrong = Some("order");
        for w in 0..self.of.waves.len() {
            match self.of.waves[w].action.clone() {
                Action::Rows { residual, sum, out } => {
                    self.rows_attributes(w, residual, sum, out);
                }
                Action::MatMul { target, .. } => {
                    self.product(w);
                    self.held(w);
                    self.tiles(w);
                    for id in target.written() {
                        let sums = |branch| Written::Sums { branch, residual: id, shown: false };
                        for other in [Written::Out(id), Written::Residual(id), Written::Best(id), sums(None)] {
                            self.matmul(w, "writes another way", wrong, |m| m.target = other);
                        }
                        self.matmul(w, "writes twice", Some("in-place"), |m| m.target = sums(Some(id)));
                    }
                    if let Written::Sums { branch, residual, shown } = target {
                        let shows = Written::Sums { branch, residual, shown: !shown };
                        self.matmul(w, "shows its residual or not", Some("home"), |m| m.target = shows);
                        let without = Written::Sums { branch: None, residual, shown };
                        self.matmul(w, "leaves no sums of parts", wrong, |m| m.target = without);
                    }
                    self.then(w);
                    let Action::MatMul { x, .. } = self.of.waves[w].action else { unreachable!() };
                    self.matmul(w, "in place", Some("in-place"), |m| m.target = Written::Out(x));
                    self.add(format!("w{w}: a factor that the input has, or still lacks"), wrong, |p| {
                        let Action::MatMul { squares, .. } = &mut p.waves[w].action else { unreachable!() };
                        *squares = if squares.is_some() { None } else { Some(x) };
                    });
                }
                Action::NormHeads { x, .. } | Action::ShortConv { x, .. } => {
                    let action = match self.of.waves[w].action {
                        Action::NormHeads { .. } => Action::NormHeads { x, out: x },
                        _ => Action::ShortConv { x, out: x },
                    };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::Append { x, queries: _ } => {
                    let action = Action::Append { x, queries: x };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::Attend { queries, out, gate, wide, tile: now } => {
                    for tile in [0, 8, 24, 80, 1024, u32::MAX - 15] {
                        let action = Action::Attend { queries, out, tile, wide, gate };
                        self.add(format!("w{w} in tiles of {tile}"), wrong, |p| p.waves[w].action = action);
                    }
                    if !wide {
                        let action = Action::Attend { queries, out, tile: now, wide: true, gate };
                        self.add(format!("w{w} by warpgroups"), wrong, |p| p.waves[w].action = action);
                    }
                    for gate in [gate.xor(Some(queries)), gate.map(|_| queries)].into_iter().filter(|of| *of != gate) {
                        let action = Action::Attend { queries, out, tile: now, wide, gate };
                        self.add(format!("w{w} with gate {gate:?}"), wrong, |p| p.waves[w].action = action);
                    }
                }
                Action::Merge { out, splits, gate } => {
                    for splits in other_splits(splits) {
                        let action = Action::Merge { out, splits, gate };
                        self.add(format!("w{w} with {splits:?}"), wrong, |p| p.waves[w].action = action);
                    }
                    let left = splits.left;
                    for gate in [gate.xor(Some(left)), gate.map(|_| left)].into_iter().filter(|of| *of != gate) {
                        let action = Action::Merge { out, splits, gate };
                        self.add(format!("w{w} with gate {gate:?}"), wrong, |p| p.waves[w].action = action);
                    }
                    let action = Action::Merge { out: splits.left, splits, gate };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::AttendRow { x, out, tile: now, splits } => {
                    let others = splits.iter().flat_map(|splits| other_splits(*splits)).map(Some);
                    for splits in others.chain(splits.map(|_| None)).collect::<Vec<_>>() {
                        let action = Action::AttendRow { x, out, tile: now, splits };
                        self.add(format!("w{w} with {splits:?}"), wrong, |p| p.waves[w].action = action);
                    }
                    for tile in [0, 8, 24, 80, 1024, u32::MAX - 15] {
                        let action = Action::AttendRow { x, out, tile, splits };
                        self.add(format!("w{w} in tiles of {tile}"), wrong, |p| p.waves[w].action = action);
                    }
                    let apart = [
                        Action::Append { x, queries: out },
                        Action::Attend { queries: x, out, tile: 16, wide: false, gate: None },
                    ];
                    for action in apart {
                        let what = format!("w{w} as {}", action.name());
                        self.add(what, wrong, |p| p.waves[w].action = action);
                    }
                    let action = Action::AttendRow { x, out: x, tile: 16, splits };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                // `waves_experts` has the attributes of the last two.
                Action::Scores { .. }
                | Action::Route { .. }
                | Action::Gather { .. }
                | Action::Places { .. }
                | Action::Fill { .. }
                | Action::Experts { .. }
                | Action::Combine { .. } => {}
                // `waves_nets` has the others.
                Action::Convolve { x, .. } => {
                    let action = Action::Convolve { x, scalars: x, out: x };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::Mix { turned, x, .. } => {
                    let action = Action::Mix { turned, x, out: turned };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::Gated { mixed, x, .. } => {
                    let action = Action::Gated { mixed, x, out: mixed };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::MixRow { x, scalars, .. } => {
                    let action = Action::MixRow { x, scalars, out: x };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                    let apart = Action::Convolve { x, scalars, out: WorkId(0) };
                    self.add(format!("w{w} as a convolution"), None, |p| p.waves[w].action = apart);
                }
            }
        }
    }

    /// Boxes that do not make up a pass, and those of what has no weights.
    fn boxes(&mut self) {
        let swizzled = self.of.machine.products == Products::Shared;
        for w in 0..self.of.waves.len() {
            let now = self.of.waves[w].boxes.clone();
            let none = swizzled && !now.is_empty();
            self.add(format!("w{w} without boxes"), none.then_some("boxes"), |p| p.waves[w].boxes.clear());
            for at in 0..now.len() {
                for units in [0, now[at] + 1, 257, u32::MAX] {
                    self.add(format!("w{w} with a box of {units} units"), Some("boxes"), |p| {
                        p.waves[w].boxes[at] = units;
                    });
                }
                let less = Some("boxes").filter(|_| now.len() > 1 || swizzled);
                self.add(format!("w{w} with a box less"), less, |p| {
                    p.waves[w].boxes.remove(at);
                });
            }
            self.add(format!("w{w} with a box more"), Some("boxes"), |p| p.waves[w].boxes.push(8));
        }
    }

    /// Orders of sums in which one number differs, and those of other waves.
    fn sums(&mut self) {
        for w in 0..self.of.waves.len() {
            let others = [
                Sums::Row { parts: 1 },
                Sums::Product { parts: 1, granules: 2, groups: 1, paired: false, squares: 0, tiles: false },
                Sums::Heads,
                Sums::History { tile: 16, heads: 1, scratch_bytes: 0, split: None },
                Sums::Splits { positions: 16 },
            ];
            let wrong = others.into_iter().chain(other_orders(self.of.waves[w].sums));
            for sums in wrong.filter(|sums| *sums != self.of.waves[w].sums).collect::<Vec<_>>() {
                self.add(format!("w{w} in order({sums})"), Some("sums"), |p| p.waves[w].sums = sums);
            }
        }
    }

    /// Splits whose places are shared by two rows or two splits, and those that both waves have and that are too few or no whole tiles.
    fn splits(&mut self) {
        let wrong = Some("order");
        let waves = self.of.waves.iter().enumerate();
        let merges = waves.filter_map(|(w, wave)| match wave.action {
            Action::Merge { splits, .. } => Some((w, splits)),
            _ => None,
        });
        for (w, now) in merges.collect::<Vec<_>>() {
            let left = now.left.index();
            for (most, rule) in [(0, wrong), (1, wrong), (now.most - 1, wrong), (now.most + 1, None)] {
                let name = format!("places of w{w} for {most} splits");
                self.add(name, rule, |p| p.work[left].layout = Layout::Splits(most));
            }
            self.add(format!("places of w{w} for a column less"), wrong, |p| p.work[left].cols -= 1);
            let rows = Layout::Rows(DType::F32);
            self.add(format!("places of w{w} for rows alone"), wrong, |p| p.work[left].layout = rows);
            let Splits { positions, most, .. } = now;
            for (positions, most, rule) in [
                (positions, most - 1, "order"),
                (positions / 2, most, "order"),
                (positions - 1, most, "order"),
                (0, most, "order"),
                (2 * positions, most, "sums"),
            ] {
                self.add(format!("w{w}: {most} splits of {positions} in both waves"), Some(rule), |p| {
                    for wave in &mut p.waves[w - 1..=w] {
                        if let Action::AttendRow { splits: Some(splits), .. } | Action::Merge { splits, .. } =
                            &mut wave.action
                        {
                            (splits.positions, splits.most) = (positions, most);
                        }
                    }
                });
            }
        }
    }

    /// Changes the way in which a wave multiplies.
    fn matmul(&mut self, w: usize, what: &str, rule: Option<&'static str>, change: impl FnOnce(&mut Product)) {
        self.add(format!("w{w}: {what}"), rule, |p| change_product(p, w, change));
    }

    /// Passes and chunks that do not fit, and warps without work.
    fn product(&mut self, w: usize) {
        let (ring, tiles) = (Some("ring"), self.of.block_rows / 16);
        let Op::MatVec(m) = &self.program.grids[self.of.waves[w].grid.index()].op else { panic!("a product") };
        // Spans of 32 of k of a granule of plain weights.
        let spans = 8 / m.unit_rows;
        for n in [0, 97, 4096, u32::MAX - 7] {
            self.matmul(w, &format!("passes of {n}"), ring, |m| m.pass = n);
        }
        // No chunk, chunks that are no whole blocks of 64 columns or have no common step with those of inputs, and chunks larger than a slot.
        let inputs = self.of.machine.inputs.slot_bytes / (self.of.block_rows * 64);
        let shares_step = |n: u32| n.is_multiple_of(2) && (n.is_multiple_of(inputs) || inputs.is_multiple_of(n));
        let odd = [1, 3, 5, 6, 7, 10].into_iter().filter(|&n| n % spans == 0 && !shares_step(n)).map(|n| n / spans);
        for n in odd.chain([0, 1 << 20, u32::MAX - 1]).collect::<Vec<_>>() {
            self.matmul(w, &format!("chunks of {n}"), ring, |m| m.chunk = n);
        }
        self.matmul(w, "the largest pass and chunk", ring, |m| (m.pass, m.chunk) = (u32::MAX, u32::MAX));
        let most = u32::MAX;
        for (rows, units, k) in
            [(0, 8, 1), (2, 2, 1), (1, 1, 1), (2, 4, 2), (8, 8, 8), (1, 8, 0), (most, 1, 1), (most, most, most)]
        {
            let wrong = Warps { rows, units, k };
            self.matmul(w, &format!("{wrong:?}"), ring, |m| m.warps = wrong);
        }
        for rows in [2, 4, 8].into_iter().filter(|rows| !tiles.is_multiple_of(*rows)) {
            let wrong = Warps { rows, units: 8 / rows, k: 1 };
            self.matmul(w, &format!("{rows} groups of rows"), ring, |m| m.warps = wrong);
        }
        // With a step of two granules, eight groups get none. In chunks no number of groups is allowed, because they have no scratch.
        self.matmul(w, "more groups of k than granules", ring, |m| {
            (m.pass, m.chunk, m.warps) = (1, (2 / spans).max(1), Warps { rows: 1, units: 1, k: 8 });
        });
        if self.of.form == Form::Chunk {
            let wrong = Warps { rows: 2, units: 2, k: 2 };
            self.matmul(w, "groups of k", ring, |m| m.warps = wrong);
        }
    }

    /// Held chunks: outside a step, of a part of k, up to the middle of a chunk of the input, as many as the ring has or more, and none.
    fn held(&mut self, w: usize) {
        let (ring, Plan { form, block_rows, machine, .. }) = (Some("ring"), self.of);
        let Wave { action: Action::MatMul { chunk, .. }, division, .. } = self.of.waves[w] else { panic!("a product") };
        let Op::MatVec(m) = &self.program.grids[self.of.waves[w].grid.index()].op else { panic!("a product") };
        let Over::Units { parts, .. } = self.of.divisions[division.index()].over else { panic!("a product") };
        let (spans, inputs) = (8 / m.unit_rows * chunk, machine.inputs.slot_bytes / (block_rows * 64));
        for n in 1..machine.weights.slots {
            let wrong = *form != Form::Steps || parts > 1 || !(n * spans).is_multiple_of(inputs);
            if wrong {
                self.matmul(w, &format!("{n} chunks held"), ring, |m| m.held = n);
            }
        }
        for n in [machine.weights.slots, 8, u32::MAX] {
            self.matmul(w, &format!("{n} chunks held"), ring, |m| m.held = n);
        }
        self.matmul(w, "nothing held", None, |m| m.held = 0);
    }

    /// A product of warps as tiles, and the other way round: once alone, and once with an input of the layout that fits.
    fn tiles(&mut self, w: usize) {
        let (wrong, is_tiles) = (Some("order"), tile_waves(self.of).contains(&w));
        self.matmul(w, "multiplied otherwise", wrong, |m| m.tiles = !is_tiles);
        if is_tiles {
            self.add(format!("w{w}: by warps, and its input is for them"), None, |p| {
                reads_otherwise(p, w, Layout::Operand);
                change_product(p, w, |m| m.tiles = false);
            });
            self.add(format!("w{w}: its input is for warps"), wrong, |p| reads_otherwise(p, w, Layout::Operand));
            return;
        }
        let (x, before) = match (&self.of.waves[w].action, w.checked_sub(1).map(|w| &self.of.waves[w].action)) {
            (Action::MatMul { x, .. }, Some(Action::Rows { out: Some(Input { to, .. }), .. })) => (*x, *to),
            (Action::MatMul { x, .. }, Some(Action::MatMul { then: Some(Input { to, .. }), .. })) => (*x, *to),
            _ => return,
        };
        if x == before {
            self.add(format!("w{w}: its input is for warpgroups"), wrong, |p| reads_otherwise(p, w, Layout::Tiles));
            // Of a gated product of some numbers of rows this is a plan that computes the same.
            let program = self.program;
            self.add(format!("w{w} in tiles"), None, |p| in_tiles(p, program, w));
            self.add(format!("w{w} in tiles, in the order of warps"), None, |p| {
                let sums = p.waves[w].sums;
                in_tiles(p, program, w);
                p.waves[w].sums = sums;
            });
        }
    }

    /// The input of the next product, left out or left otherwise, and left by a product that has not the residual in pairs.
    fn then(&mut self, w: usize) {
        let wrong = Some("order");
        let Action::MatMul { then, .. } = self.of.waves[w].action else { panic!("a product") };
        let Some(then) = then else {
            let others = self.of.waves.iter().filter_map(|wave| match wave.action {
                Action::MatMul { then, .. } => then,
                Action::Rows { out, .. } => out,
                _ => None,
            });
            for other in others.collect::<Vec<_>>().into_iter().take(3) {
                self.matmul(w, "an input of the next product", None, |m| m.then = Some(other));
            }
            return;
        };
        self.matmul(w, "no input of the next product", wrong, |m| m.then = None);
        self.matmul(w, "a norm without squares", wrong, |m| m.then = Some(Input { squares: None, ..then }));
        for norm in then.norm.into_iter().flat_map(other_norms).map(Some).chain([None]) {
            self.matmul(w, "a norm of no product", wrong, |m| m.then = Some(Input { norm, ..then }));
        }
        let Input { to, squares, .. } = then;
        let Action::MatMul { target, .. } = self.of.waves[w].action else { panic!("a product") };
        let residual = target.residual().expect("a residual");
        self.matmul(w, "the input over the residual", Some("in-place"), |m| {
            m.then = Some(Input { to: residual, ..then });
        });
        self.matmul(w, "squares over the input", Some("in-place"), |m| {
            m.then = Some(Input { squares: Some(to), ..then })
        });
        // Squares of the same shape that an earlier wave left.
        let old = self.of.work[squares.expect("squares").index()].clone();
        let (id, place) = (WorkId::from(self.of.work.len()), self.of.work_bytes().next_multiple_of(256));
        self.add(format!("w{w}: the next product reads other squares"), wrong, |p| {
            p.work.push(Work { place, ..old });
            let reader = p.waves[w + 1..].iter_mut().find_map(|wave| match &mut wave.action {
                Action::MatMul { squares, .. } if squares.is_some() => Some(squares),
                _ => None,
            });
            *reader.expect("the next product") = Some(id);
        });
    }

    /// Blocks that are no pairs, or have other parts than their peers.
    fn pairs(&mut self) {
        let wrong = Some("order");
        let waves = self.of.waves.iter().enumerate();
        let paired =
            waves.filter_map(|(w, wave)| match (&wave.action, self.of.divisions[wave.division.index()].over) {
                (&Action::MatMul { target: Written::Residual(_), pass, .. }, Over::Units { n, parts: 2, .. }) => {
                    Some((w, wave.division.index(), pass, n))
                }
                _ => None,
            });
        let paired: Vec<_> = paired.collect();
        self.add("no pairs", (!paired.is_empty()).then_some("order"), |p| p.machine.pairs = false);
        // Of a chunk: each block of a pair copies half of the units of both.
        for (d, division) in self.of.divisions.iter().enumerate() {
            let apart =
                |blocks: &usize| self.of.shares_weights(*blocks as u32) && matches!(division.over, Over::Units { .. });
            for blocks in (1..=division.shares.len()).filter(apart) {
                let sms = &division.shares[blocks - 1];
                if let Some(other) = (3..sms.len()).step_by(2).find(|sm| sms[*sm] != sms[1]) {
                    let name = format!("d{d}, {blocks} blocks: blocks of a pair with other units");
                    self.add(name, Some("pairs"), |p| p.divisions[d].shares[blocks - 1].swap(1, other));
                }
            }
        }
        for (w, d, pass, n) in paired {
            for (what, change) in unpaired() {
                self.add(format!("w{w}: {what}"), wrong, |p| change(&mut p.divisions[d].shares[0], n));
            }
            if n > pass {
                self.add(format!("w{w}: units of several passes"), wrong, |p| {
                    let rows = p.block_rows;
                    for (sm, shares) in (0..).zip(&mut p.divisions[d].shares[0]) {
                        let all = Share { row: 0, rows, lo: sm % 2 * n, hi: (sm % 2 + 1) * n };
                        *shares = if sm < 2 { vec![all] } else { vec![] };
                    }
                });
            }
        }
    }

    /// A division of `n` units in `parts` parts that gives all of them to the first SM, or to the first pair of SMs if pairs share weights.
    fn divided(&self, n: u32, parts: u32) -> Division {
        let Plan { rows, block_rows, machine, .. } = self.of;
        let shares = |blocks: u32| {
            let row = |block: u32| block * block_rows;
            let parts = parts_of(parts, blocks);
            let of = |block| (0..parts).map(move |part| (block, part));
            let all = (0..blocks).flat_map(of).map(|(block, part)| Share {
                row: row(block),
                rows: *block_rows,
                lo: part * n,
                hi: part * n + n,
            });
            let mut of_sms = vec![vec![]; machine.sms as usize];
            let sm = |share: &Share| if self.of.shares_weights(blocks) { share.row / block_rows % 2 } else { 0 };
            all.for_each(|share| of_sms[sm(&share) as usize].push(share));
            of_sms
        };
        Division { over: Over::Units { n, parts, step: 1 }, shares: (1..=rows / block_rows).map(shares).collect() }
    }

    /// Products with another number of parts than their outputs and the readers of these.
    fn parts(&mut self) {
        let wrong = Some("order");
        for w in 0..self.of.waves.len() {
            let Wave { action: Action::MatMul { target, then, .. }, division, .. } = self.of.waves[w].clone() else {
                continue;
            };
            let Over::Units { n, parts, .. } = self.of.divisions[division.index()].over else { unreachable!() };
            let DivisionId(next) = DivisionId(self.of.divisions.len() as u32);
            for other in [1, 2, 3].into_iter().filter(|other| *other != parts) {
                let division = self.divided(n, other);
                // Of a product that adds the whole is the same, in another order.
                let adds = matches!(target, Written::Residual(_)) && then.is_none() && other == 1;
                let rule = if adds { Some("sums") } else { wrong };
                self.add(format!("w{w} in {other} parts, which nothing else knows"), rule, |p| {
                    p.divisions.push(division);
                    p.waves[w].division = DivisionId(next);
                });
            }
            let Written::Out(out) = target else { continue };
            // An output in parts is read as plain rows, and the other way round.
            let Work { layout, cols, .. } = self.of.work[out.index()];
            let other = if parts > 1 { Layout::Rows(DType::Bf16) } else { Layout::Parts(2) };
            if layout == Layout::Operand {
                continue;
            }
            let reader = (w + 1..self.of.waves.len()).find(|&r| self.of.waves[r].action.accesses().0.contains(&out));
            let (id, place) = (WorkId(self.of.work.len() as u32), self.of.work_bytes().next_multiple_of(256));
            let new = Work { name: "other".to_string(), layout: other, cols, place, everywhere: false };
            self.add(format!("what w{w} writes is read as {other:?}"), wrong, |p| {
                p.work.push(new.clone());
                let read = works(&mut p.waves[reader.expect("a reader")].action).into_iter().find(|id| **id == out);
                *read.expect("the operand") = id;
            });
            self.matmul_to(w, id, new, wrong);
            // In a chunk, parts that all readers know: there is no room for those of several blocks.
            if self.of.form == Form::Chunk && layout == Layout::Rows(DType::Bf16) {
                let writers = self.of.waves.iter().enumerate().filter_map(|(w, wave)| match wave.action {
                    Action::MatMul { target: Written::Out(to), .. } if to == out => Some((w, wave.division)),
                    _ => None,
                });
                let divided = writers.map(|(w, division)| match self.of.divisions[division.index()].over {
                    Over::Units { n, .. } => (w, self.divided(n, 2)),
                    _ => unreachable!(),
                });
                let divided: Vec<_> = divided.collect();
                self.add(format!("w{w} of a chunk in parts"), Some("ring"), |p| {
                    for (w, division) in divided {
                        p.waves[w].division = DivisionId(p.divisions.len() as u32);
                        p.divisions.push(division);
                    }
                    // At the end of the arena, where there is room.
                    p.work[out.index()].place = p.work_bytes().next_multiple_of(256);
                    p.work[out.index()].layout = Layout::Parts(2);
                });
            }
        }
        for d in 0..self.of.divisions.len() {
            let Over::Units { n, parts, .. } = self.of.divisions[d].over else { continue };
            let partition = Some("partition");
            for other in [0, parts + 1, 3 - parts.min(2), 256] {
                let over = Over::Units { n, parts: other, step: 1 };
                self.add(format!("d{d} over {over:?}"), partition, |p| p.divisions[d].over = over);
            }
            if parts == 1 {
                continue;
            }
            for part in 0..parts {
                self.add(format!("d{d} without part {part}"), partition, |p| {
                    let shares = p.divisions[d].shares[0].iter_mut();
                    shares.for_each(|shares| shares.retain(|share| share.lo / n != part));
                });
            }
            self.add(format!("d{d}: a share of two parts"), partition, |p| {
                let shares: Vec<&mut Share> = p.divisions[d].shares[0].iter_mut().flatten().collect();
                for share in shares {
                    share.hi += u32::from(share.hi == n);
                    share.lo += u32::from(share.lo == n);
                }
            });
            self.add(format!("d{d}: all of it is one share"), partition, |p| {
                let rows = p.rows;
                p.divisions[d].shares[0].iter_mut().for_each(Vec::clear);
                p.divisions[d].shares[0][0].push(Share { row: 0, rows, lo: 0, hi: n * parts });
            });
        }
    }

    /// A product writes into a buffer that was added.
    fn matmul_to(&mut self, w: usize, id: WorkId, new: Work, rule: Option<&'static str>) {
        self.add(format!("w{w} writes {:?}", new.layout), rule, |p| {
            p.work.push(new);
            let Action::MatMul { target, .. } = &mut p.waves[w].action else { unreachable!() };
            *target = Written::Out(id);
        });
    }

    /// Rows that add the parts of a product.
    fn addends(&mut self) {
        let wrong = Some("order");
        let inputs = self.of.waves.iter().find_map(|wave| match wave.action {
            Action::Rows { out: Some(Input { norm, .. }), .. } => norm,
            _ => None,
        });
        for w in 1..self.of.waves.len() {
            let Action::Rows { residual, sum: Some(Sum::Branch { branch, norm: None, scale }), out } =
                self.of.waves[w].action
            else {
                continue;
            };
            let mut with = |what: &str, sum| {
                self.add(format!("w{w}: {what}"), wrong, |p| p.waves[w].action = Action::Rows { residual, sum, out });
            };
            with("an addend that is normalised", Some(Sum::Branch { branch, norm: inputs, scale }));
            with("an addend that is scaled twice", Some(Sum::Branch { branch, norm: None, scale: scale * 0.5 }));
            with("an addend that is not added", None);
            self.add(format!("w{w}: the product adds, and the addend is added"), wrong, |p| {
                let Action::MatMul { target, .. } = &mut p.waves[w - 1].action else { panic!("the product") };
                *target = Written::Residual(residual);
            });
            // The parts of another product with the same layout: those of the previous layer are overwritten.
            self.add(format!("w{w}: before its product"), wrong, |p| p.waves.swap(w - 1, w));
            self.add(format!("w{w}: a wave on"), wrong, |p| {
                if w + 1 < p.waves.len() {
                    p.waves.swap(w, w + 1);
                } else {
                    p.waves.clear();
                }
            });
        }
    }

    /// The decisions of steps, and where the next step reads them.
    fn best(&mut self) {
        let wrong = Some("order");
        let Action::Rows { residual, sum: Some(Sum::Embed { table, scale, best }), out } = self.of.waves[0].action
        else {
            return;
        };
        let (id, place) = (WorkId(self.of.work.len() as u32), self.of.work_bytes().next_multiple_of(256));
        let new = Work {
            name: "other".to_string(),
            layout: Layout::Best,
            cols: self.of.machine.sms,
            place,
            everywhere: false,
        };
        let sum = |best| Some(Sum::Embed { table, scale, best });
        self.add("another buffer of best logits", wrong, |p| {
            p.work.push(new.clone());
            p.waves[0].action = Action::Rows { residual, sum: sum(Some(id)), out };
        });
        let Some(best) = best else { return };
        self.add("no best logits", wrong, |p| p.waves[0].action = Action::Rows { residual, sum: sum(None), out });
        let last = self.of.waves.len() - 1;
        self.add("best logits that nothing reads", wrong, |p| {
            p.work.push(new);
            let Action::MatMul { target, .. } = &mut p.waves[last].action else { panic!("a product") };
            *target = Written::Best(id);
        });
        for w in 0..self.of.waves.len() {
            if w != last && matches!(self.of.waves[w].action, Action::MatMul { .. }) {
                self.matmul(w, "best of no logits", wrong, |m| m.target = Written::Best(best));
            }
        }
        for cols in [self.of.machine.sms - 1, self.of.machine.sms + 1] {
            self.add(format!("best logits of {cols} blocks"), None, |p| p.work[best.index()].cols = cols);
        }
        // Scratch without room for the values that the warps of a block exchange.
        for n in [0, 128, 512] {
            self.add(format!("{n} bytes of scratch"), None, |p| p.machine.scratch_bytes = n);
        }
    }

    fn rows_attributes(&mut self, w: usize, residual: WorkId, sum: Option<Sum>, out: Option<Input>) {
        let (wrong, of, program) = (Some("order"), self.of, self.program);
        let mut with = |name: &str, rule, sum, out| {
            self.add(format!("w{w}: {name}"), rule, |p| p.waves[w].action = Action::Rows { residual, sum, out });
        };
        match sum {
            Some(Sum::Embed { table, scale, best }) => {
                with("another scale", wrong, Some(Sum::Embed { table, scale: scale * 1.01, best }), out);
                with("no scale", wrong, Some(Sum::Embed { table, scale: f32::NAN, best }), out);
                for table in [table.0 + 1, u32::MAX] {
                    with("another table", wrong, Some(Sum::Embed { table: BufferId(table), scale, best }), out);
                }
            }
            Some(Sum::Branch { branch, norm, scale }) => {
                with("another scale", wrong, Some(Sum::Branch { branch, norm, scale: -scale }), out);
                for other in norm.into_iter().flat_map(other_norms).map(Some).chain([None]) {
                    if other != norm {
                        with(
                            "another norm of the branch",
                            wrong,
                            Some(Sum::Branch { branch, norm: other, scale }),
                            out,
                        );
                    }
                }
            }
            Some(Sum::Taken) => {
                let embed = |grid: &&Grid| matches!(grid.op, Op::Embed { .. });
                let table = program.grids.iter().find(embed).and_then(|grid| grid.operand(Role::Table));
                let table = table.expect("a table").buffer;
                for best in [None, of.best()] {
                    let sum = Some(Sum::Embed { table, scale: 1.0, best });
                    with("an embedding", wrong, sum, out);
                }
                let branch = of.work.iter().position(|work| matches!(work.layout, Layout::Parts(_)));
                let branch = WorkId(branch.expect("a branch") as u32);
                with("a branch", wrong, Some(Sum::Branch { branch, norm: None, scale: 1.0 }), out);
            }
            Some(Sum::Slots(slots)) => {
                for slots in [Slots { places: slots.shares, ..slots }, Slots { x: residual, ..slots }] {
                    with("other slots", wrong, Some(Sum::Slots(slots)), out);
                }
            }
            None => {}
        }
        if sum != Some(Sum::Taken) {
            with("the residual of a chunk", wrong, Some(Sum::Taken), out);
        }
        with("no sum", wrong, None, out);
        match out {
            Some(input) => {
                with("no input", wrong, sum, None);
                let twice = sum.map(|_| "in-place");
                with("the input over the residual", twice, sum, Some(Input { to: residual, ..input }));
                for norm in input.norm.into_iter().flat_map(other_norms).map(Some).chain([None]) {
                    with("another norm", wrong, sum, Some(Input { norm, ..input }));
                }
                let squares = if input.squares.is_some() { None } else { Some(WorkId(0)) };
                with("another norm of parts", None, sum, Some(Input { squares, ..input }));
            }
            // A product overwrites it before it is read, but its norm may name any buffer.
            None => {
                let inputs = self.of.waves.iter().filter_map(|wave| match wave.action {
                    Action::Rows { out, .. } => out,
                    _ => None,
                });
                let norms: Vec<_> = inputs.filter_map(|out| Some((out.to, out.norm?))).collect();
                for (to, norm) in
                    norms.into_iter().take(2).flat_map(|(to, norm)| other_norms(norm).into_iter().map(move |n| (to, n)))
                {
                    let action = Action::Rows {
                        residual,
                        sum,
                        out: Some(Input { to, norm: Some(norm), squares: None, rows: None }),
                    };
                    self.add(format!("w{w}: an input of no product"), wrong, |p| p.waves[w].action = action);
                }
            }
        }
    }

    fn divisions(&mut self) {
        let wrong = Some("partition");
        for d in 0..self.of.divisions.len() {
            let over = self.of.divisions[d].over;
            let others: Vec<Over> = match over {
                Over::Rows { parts } => [0, parts + 1, parts * 2].map(|parts| Over::Rows { parts }).to_vec(),
                Over::Sums { parts } => [0, 1, 2 * parts].map(|parts| Over::Sums { parts }).to_vec(),
                Over::Units { n, parts, step } => {
                    let others = [0, n - 1, n + 1, u32::MAX >> 8].map(|n| Over::Units { n, parts, step });
                    others.into_iter().chain([Over::Units { n, parts, step: 0 }]).collect()
                }
                Over::Heads { n, rows, kept } => {
                    let some = [(0, rows), (n - 1, rows), (n + 1, rows), (n, 0), (n, rows / 2), (n, 3), (n, u32::MAX)];
                    some.into_iter().chain([(n, rows * 2)]).map(|(n, rows)| Over::Heads { n, rows, kept }).collect()
                }
                Over::States { n } => [0, n - 1, n + 1, 2 * n].map(|n| Over::States { n }).to_vec(),
                Over::Items { .. } => {
                    let share = Share { row: 0, rows: 1, lo: 0, hi: 1 };
                    self.add(format!("d{d} with a share"), wrong, |p| p.divisions[d].shares[0][0].push(share));
                    self.add(format!("d{d} as rows"), wrong, |p| p.divisions[d].over = Over::Rows { parts: 1 });
                    continue;
                }
            };
            for other in others {
                self.add(format!("d{d} over {other:?}"), wrong, |p| p.divisions[d].over = other);
            }
            self.add(format!("d{d} without a number of blocks"), wrong, |p| drop(p.divisions[d].shares.pop()));
            self.add(format!("d{d} without any"), wrong, |p| p.divisions[d].shares.clear());
            for blocks in 0..self.of.divisions[d].shares.len() {
                let name = |what: &str| format!("d{d}, {} blocks: {what}", blocks + 1);
                self.add(name("an SM without a list"), wrong, |p| drop(p.divisions[d].shares[blocks].pop()));
                self.add(name("an SM too many"), wrong, |p| p.divisions[d].shares[blocks].push(vec![]));
                let sms = &self.of.divisions[d].shares[blocks];
                let busy: Vec<usize> = (0..sms.len()).filter(|sm| !sms[*sm].is_empty()).collect();
                for sm in [busy[0], busy[busy.len() - 1]] {
                    self.shares(d, blocks, sm, &name(&format!("sm{sm}")));
                }
            }
        }
    }

    fn shares(&mut self, d: usize, blocks: usize, sm: usize, name: &str) {
        let wrong = Some("partition");
        let n = self.of.divisions[d].shares[blocks][sm].len();
        let changes: [Change; 10] = [
            ("a row on", |s| s.row += 1),
            ("a block on", |s| s.row += 128),
            ("rows from the end of numbers on", |s| s.row = u32::MAX - 1),
            ("a row less", |s| s.rows -= 1),
            ("a row more", |s| s.rows += 1),
            ("all rows that there are", |s| s.rows = u32::MAX),
            ("from one on", |s| s.lo += 1),
            ("up to one more", |s| s.hi += 1),
            ("up to the end of numbers", |s| s.hi = u32::MAX),
            ("nothing", |s| s.hi = s.lo),
        ];
        for at in [0, n - 1] {
            for (what, change) in changes {
                self.add(format!("{name}: {what}"), wrong, |p| change(&mut p.divisions[d].shares[blocks][sm][at]));
            }
            self.add(format!("{name}: dropped"), wrong, |p| {
                p.divisions[d].shares[blocks][sm].remove(at);
            });
            self.add(format!("{name}: twice"), wrong, |p| {
                let share = p.divisions[d].shares[blocks][sm][at];
                p.divisions[d].shares[blocks][0].push(share);
            });
        }
    }
}

/// A change of the shares of all SMs of a product of so many units.
type Regroup = fn(&mut Vec<Vec<Share>>, u32);

/// Divisions of two parts that no pairs of blocks can have.
pub fn unpaired() -> [(&'static str, Regroup); 5] {
    [
        ("parts that are swapped", |all, _| all.chunks_mut(2).for_each(|pair| pair.swap(0, 1))),
        ("the parts of one pair swapped", |all, _| {
            let first = all.iter().position(|shares| !shares.is_empty()).expect("a share") / 2 * 2;
            all.swap(first, first + 1);
        }),
        ("both parts in one block", |all, _| {
            for pair in all.chunks_mut(2) {
                let other = std::mem::take(&mut pair[1]);
                pair[0].extend(other);
            }
        }),
        ("other units than the peer has", |all, _| {
            let busy: Vec<usize> = (1..all.len()).step_by(2).filter(|sm| !all[*sm].is_empty()).collect();
            all.swap(busy[0], busy[1]);
        }),
        ("each part in half of the blocks", |all, n| {
            let (first, second) = all.concat().into_iter().partition::<Vec<_>, _>(|share| share.lo < n);
            let half = all.len() / 2;
            for (part, at) in [(first, 0), (second, half)] {
                all[at..at + half].fill(vec![]);
                for (i, share) in part.into_iter().enumerate() {
                    all[at + i].push(share);
                }
            }
        }),
    ]
}

/// The name of a ring, and its field in a plan.
type RingOf = (&'static str, fn(&mut Plan) -> &mut Ring);

/// How a wave multiplies.
struct Product {
    target: Written,
    then: Option<Input>,
    pass: u32,
    chunk: u32,
    warps: Warps,
    tiles: bool,
    held: u32,
}

/// Changes how wave `w` multiplies.
fn change_product(p: &mut Plan, w: usize, change: impl FnOnce(&mut Product)) {
    let Action::MatMul { x, squares, target, then, pass, chunk, warps, tiles, held } = p.waves[w].action else {
        panic!("a product")
    };
    let mut product = Product { target, then, pass, chunk, warps, tiles, held };
    change(&mut product);
    let was = (pass, chunk);
    let Product { target, then, pass, chunk, warps, tiles, held } = product;
    // Weights may be copied unit by unit, too.
    if was != (pass, chunk) && p.machine.products != Products::Shared {
        p.waves[w].boxes.clear();
    }
    p.waves[w].action = Action::MatMul { x, squares, target, then, pass, chunk, warps, tiles, held };
}

/// The wave before `w` leaves the input of that product, and of no other one, in `layout`.
fn reads_otherwise(p: &mut Plan, w: usize, layout: Layout) {
    let (id, place) = (WorkId::from(p.work.len()), p.work_bytes().next_multiple_of(256));
    let Action::MatMul { x, .. } = &mut p.waves[w].action else { panic!("a product") };
    p.work.push(Work { layout, place, ..p.work[x.index()].clone() });
    *x = id;
    match &mut p.waves[w - 1].action {
        Action::Rows { out: Some(Input { to, .. }), .. } | Action::MatMul { then: Some(Input { to, .. }), .. } => {
            *to = id;
        }
        Action::MatMul { target: Written::Out(to), .. } => *to = id,
        _ => panic!("a wave that leaves the input"),
    }
}

/// The product of wave `w` becomes tiles: of up to 16 units, in chunks of 64 of k or of a granule of codes.
fn in_tiles(p: &mut Plan, program: &Program, w: usize) {
    let grid = &program.grids[p.waves[w].grid.index()];
    let Op::MatVec(m) = &grid.op else { panic!("a product") };
    let granule_k = program.format_of(grid).granule_k() * m.parts();
    reads_otherwise(p, w, Layout::Tiles);
    change_product(p, w, |product| {
        let warps = Warps { rows: 1, units: 8, k: 1 };
        (product.tiles, product.held, product.warps) = (true, 0, warps);
        (product.pass, product.chunk) = (product.pass.min(16), (64 / granule_k).max(1));
    });
    let granules = m.k.div_ceil(granule_k);
    p.waves[w].sums = Sums::Product { parts: 1, granules, groups: 1, paired: false, squares: 0, tiles: true };
}

/// A change of a share, with its name.
type Change = (&'static str, fn(&mut Share));

/// Splits of which one number is another one.
fn other_splits(splits: Splits) -> Vec<Splits> {
    let Splits { positions, most, .. } = splits;
    let lengths = [0, 1, positions / 2, positions - 1, positions + 1, 2 * positions, u32::MAX];
    let counts = [0, 1, most - 1, most + 1, 2 * most, u32::MAX];
    let lengths = lengths.into_iter().map(|positions| Splits { positions, ..splits });
    lengths.chain(counts.into_iter().map(|most| Splits { most, ..splits })).filter(|other| *other != splits).collect()
}

fn other_norms(norm: NormOf) -> Vec<NormOf> {
    let mut eps = norm;
    eps.norm.eps *= 2.0;
    let other = norm.weight.map(|id| BufferId(id.0 + 1));
    let far = Some(BufferId(u32::MAX));
    vec![
        eps,
        NormOf { weight: None, ..norm },
        NormOf { weight: other, ..norm },
        NormOf { weight: far, ..norm },
        NormOf { bias: far, ..norm },
    ]
}

/// Every mutant of a plan either has no proof, or computes the same: two judges for one question. Returns the number of mutants.
fn judge_mutants(name: &str, target: &Target, form: Form, rows: u32) -> usize {
    judge_mutants_in(name, target, form, rows, None)
}

/// `split`: positions of a KV split, if histories are cut.
fn judge_mutants_in(name: &str, target: &Target, form: Form, rows: u32, split: Option<u32>) -> usize {
    judge_mutants_of(name, &wide(name), target, form, rows, split)
}

/// The same of any model.
pub fn judge_mutants_of(
    name: &str,
    imported: &Imported,
    target: &Target,
    form: Form,
    rows: u32,
    split: Option<u32>,
) -> usize {
    let validated = kernel(&imported.graph, target);
    let program = &validated.schedule().program;
    let of = match split {
        None => proven(&validated, target, form, rows).unwrap(),
        Some(split) => proven_in_splits(&validated, target, rows, split),
    };
    let of = of.plan().clone();
    let mut mutants = Mutants { of: &of, program, made: vec![] };
    mutants.machine(target.spec.sm_count);
    mutants.arena();
    mutants.order();
    mutants.meetings();
    mutants.operands();
    mutants.attributes();
    mutants.sums();
    mutants.boxes();
    mutants.splits();
    mutants.divisions();
    mutants.parts();
    mutants.pairs();
    mutants.addends();
    mutants.best();
    let text = tokens(imported, if form == Form::Steps && split.is_none() { rows + 3 } else { 140 });
    judge(name, imported, &validated, target, mutants, &text)
}

/// A schedule for a plan to stand after, where any will do.
const NO_SCHEDULE: &str = "mkir 2
program \"none\" context_max=1 weights=bf16 cache=bf16 wire=fp32
machine \"none\" sms=1 consumer_warps=1 loader_warps=1 registers_per_thread=1 reduce_batch=1
ring slots=1 slot_bytes=1 arrivals=1 flight_high=1 flight_low=1 flight_free=1
";

/// The same of mutants of one plan. Those with a proof compute `text`.
fn judge(
    name: &str,
    imported: &Imported,
    validated: &Validated,
    target: &Target,
    mutants: Mutants<'_>,
    text: &[u32],
) -> usize {
    let Mutants { of: &Plan { form, rows, .. }, program, made } = mutants;
    let keys_and_values = expected(imported, text);
    let count = made.len();
    let chunk = proven(validated, target, Form::Chunk, 256).unwrap();
    for Mutant { name: what, rule, plan } in made {
        // Numbers of any size are printed and read.
        let text_of = plan.to_string();
        let read = parse(&format!("{NO_SCHEDULE}{text_of}")).unwrap_or_else(|error| panic!("{name}, {what}: {error}"));
        assert_eq!(read.plans[0].0.to_string(), text_of, "{name}, {what}");
        let judged = match form {
            Form::Tail => prove_tail(plan.clone(), chunk.clone(), target).map(Some),
            Form::Chunk | Form::Steps => prove(plan.clone(), validated, target).map(|_| None),
        };
        match judged {
            Err(violations) => {
                let named = rule.is_none_or(|rule| violations.iter().any(|violation| violation.rule.name() == rule));
                assert!(named, "{name}, {what}: expected `{}`, found\n{}", rule.unwrap(), listed(&violations));
            }
            Ok(Some(both)) => {
                assert_eq!(rule, None, "{name}, a tail, {what}: proven");
                run_tail(imported, &both, text, &[10, 140], 1);
            }
            Ok(None) => {
                assert_eq!(rule, None, "{name}, {form:?} of {rows}, {what}: proven");
                let chunks: Vec<&[u32]> = text.chunks(rows as usize).collect();
                let found = execute(program, imported, &plan, &chunks, 1);
                let difference = difference(&keys_and_values, &found);
                assert!(difference < TOLERANCE, "{name}, {what}: proven, and differs by {difference:e}");
            }
        }
    }
    count
}

/// An order of sums with one other number.
fn other_orders(sums: Sums) -> Vec<Sums> {
    let all = |numbers: &[u32]| -> Vec<Vec<u32>> {
        let with = |(at, n): (usize, u32)| {
            let mut numbers = numbers.to_vec();
            numbers[at] = n;
            numbers
        };
        let others =
            |at: usize| [numbers[at].wrapping_add(1), numbers[at].wrapping_mul(2), 0, u32::MAX].map(|n| (at, n));
        (0..numbers.len()).flat_map(others).filter(|&(at, n)| n != numbers[at]).map(with).collect()
    };
    match sums {
        Sums::Row { parts } => all(&[parts]).into_iter().map(|n| Sums::Row { parts: n[0] }).collect(),
        Sums::Product { parts, granules, groups, paired, squares, tiles } => {
            let of =
                |n: Vec<u32>| Sums::Product { parts: n[0], granules: n[1], groups: n[2], paired, squares: n[3], tiles };
            let others = [
                Sums::Product { parts, granules, groups, paired: !paired, squares, tiles },
                Sums::Product { parts, granules, groups, paired, squares, tiles: !tiles },
            ];
            all(&[parts, granules, groups, squares]).into_iter().map(of).chain(others).collect()
        }
        Sums::Heads => vec![],
        Sums::History { tile, heads, scratch_bytes, split } => {
            let of = |n: Vec<u32>| Sums::History { tile: n[0], heads: n[1], scratch_bytes: n[2], split };
            let others = [None, Some(0), Some(1), split.map(|split| 2 * split)].map(|of| (of, split));
            let others = others.into_iter().filter(|(of, split)| of != split);
            let splits = others.map(|(split, _)| Sums::History { tile, heads, scratch_bytes, split });
            all(&[tile, heads, scratch_bytes]).into_iter().map(of).chain(splits).collect()
        }
        Sums::Splits { positions } => all(&[positions]).into_iter().map(|n| Sums::Splits { positions: n[0] }).collect(),
        Sums::Choice | Sums::Nothing => vec![],
        Sums::Experts { granules, tile } => {
            all(&[granules, tile]).into_iter().map(|n| Sums::Experts { granules: n[0], tile: n[1] }).collect()
        }
        Sums::Slots { slots, shared } => {
            let others = all(&[slots]).into_iter().map(|n| Sums::Slots { slots: n[0], shared });
            others.chain([Sums::Slots { slots, shared: !shared }]).collect()
        }
        Sums::State { positions } => all(&[positions]).into_iter().map(|n| Sums::State { positions: n[0] }).collect(),
    }
}

/// Every model with plans of steps has plans for 32 and 64 rows in one order of sums: that of the plan for 64 rows.
#[test]
fn steps_of_32_and_64_rows_can_add_up_in_one_order() {
    let shapes =
        dense_configs().into_iter().map(|path| import_config_only(&fs::read_to_string(&path).unwrap(), 0).unwrap());
    let wide_heads = checkpoints("families").into_iter().map(|name| wide(&name));
    let coded = ["int4:32", "int8", "fp8"].map(|format| rounded(wide("families/llama-gqa"), &all(named(format))));
    let (mut models, mut differ) = (0, 0);
    for imported in shapes.chain(wide_heads).chain(coded) {
        let target = h200();
        let validated = kernel(&imported.graph, &target);
        let Ok(largest) = derive(validated.schedule(), &target, Form::Steps, 64) else { continue };
        models += 1;
        let family = &imported.graph.family;
        let plans = derive_alike(validated.schedule(), &target, &[32, 64]).unwrap();
        assert_eq!(plans.iter().map(|plan| plan.rows).collect::<Vec<_>>(), [32, 64], "{family}");
        // None has tiles, and without them this is the plan that is fastest for most rows.
        assert!(plans.iter().all(|plan| tile_waves(plan).is_empty()), "{family}");
        assert_eq!(plans[1] == largest, tile_waves(&largest).is_empty(), "{family}");
        let alike =
            prove_alike(plans, &validated, &target).unwrap_or_else(|rules| panic!("{family}: {}", listed(&rules)));
        assert_eq!(alike.plans().len(), 2);
        // The plan that is fastest for 32 rows may have another order. Together they have no proof.
        let free = derive(validated.schedule(), &target, Form::Steps, 32).unwrap();
        let same = free.order() == largest.order();
        let proven = prove_alike(vec![free, largest], &validated, &target);
        assert_eq!(proven.is_ok(), same, "{family}");
        if let Err(rules) = proven {
            assert!(
                rules.len() == 1 && rules[0].rule == Rule::Alike && rules[0].entity != Entity::Schedule,
                "{}",
                listed(&rules)
            );
            differ += 1;
        }
    }
    assert!(models > 20 && differ > 10, "{models} models, {differ} of which have another order");
}

/// The shapes of its head cost more than 32 bits hold.
#[test]
fn a_large_vocabulary_has_a_plan_on_few_sms() {
    let graph = Toy { hidden: 5120, heads: 2, kv_heads: 1, dim: 64, vocab: 262_144, context: 512, ..TOY }.graph();
    let mut target = h200();
    target.spec.sm_count = 4;
    let validated = kernel(&graph, &target);
    proven(&validated, &target, Form::Steps, 64).unwrap_or_else(|refused| panic!("{refused}"));
}

/// A kernel counts bytes of an input and units of a share in 32 bits.
#[test]
fn plans_whose_numbers_32_bits_do_not_hold_have_no_proof() {
    let (mut two, mut one) = (h200(), h200());
    (two.spec.sm_count, one.spec.sm_count) = (2, 1);
    let toy = Toy { heads: 2, kv_heads: 1, dim: 64, context: 512, intermediate: 65_536, vocab: 600_000, ..TOY };
    let rules = |plan: Plan, validated: &Validated, target: &Target| {
        listed(&prove(plan, validated, target).map(drop).err().unwrap_or_default())
    };
    // Rows of 128 KiB.
    let validated = kernel(&toy.graph(), &two);
    let of = |rows| rules(derive(validated.schedule(), &two, Form::Chunk, rows).unwrap(), &validated, &two);
    assert_eq!(of(32_640), "");
    assert_eq!(of(32_768), "arena: schedule: `act` has 4 GiB or more, expected places of 32 bits\n");
    // 75,000 units.
    let validated = kernel(&toy.graph(), &one);
    let mut plan = derive(validated.schedule(), &one, Form::Steps, 16).unwrap();
    assert_eq!(rules(plan.clone(), &validated, &one), "");
    let Some(Action::MatMul { pass, .. }) = plan.waves.last_mut().map(|wave| &mut wave.action) else { unreachable!() };
    *pass = 1;
    let found = rules(plan, &validated, &one);
    assert!(found.contains("passes of 1 of 75000 units, which 32 bits do not divide"), "{found}");
}

/// A plan cuts histories only where it was asked to and where that can gain: in contexts of more splits than a merge costs, not in windows.
#[test]
fn long_histories_are_cut_where_that_can_gain() {
    let target = h200();
    let splits = |context: u32, window: Option<u32>, rows: u32| {
        let graph = Toy { heads: 2, kv_heads: 1, dim: 64, context, window, ..TOY }.graph();
        let validated = kernel_up_to(context, &graph, &target, BF16);
        let whole =
            prove(derive(validated.schedule(), &target, Form::Steps, rows).unwrap(), &validated, &target).unwrap();
        assert!(whole.ragged().is_none() && whole.plan().waves.iter().all(|wave| wave.action.name() != "merge"));
        let plan = derive_ragged(validated.schedule(), &target, rows).map_err(|refused| refused.to_string())?;
        let cut = prove(plan, &validated, &target).unwrap_or_else(|violations| panic!("{}", listed(&violations)));
        let ragged = cut.ragged().expect("a plan that cuts histories");
        let mixed: Vec<u32> = std::iter::once(context - 1).chain(vec![100; rows as usize - 1]).collect();
        assert_eq!([ragged.gains(&mixed, rows), ragged.gains(&[100; 8], rows)], [true, false]);
        let first = |wave: &Wave| match wave.action {
            Action::AttendRow { splits: Some(splits), .. } => Some((splits.positions, splits.most)),
            _ => None,
        };
        Ok(cut.plan().waves.iter().find_map(first).expect("a wave with splits"))
    };
    let short = |context| Err(format!("no history of up to {context} positions is long enough to be cut"));
    assert_eq!(splits(2048, None, 32), short(2048));
    assert_eq!(splits(4096, None, 32), Ok((1024, 4)));
    assert_eq!(splits(8192, None, 64), Ok((1024, 8)));
    assert_eq!(splits(8192, Some(4096), 32), Ok((1024, 5)));
    assert_eq!(splits(8192, Some(2048), 32), short(8192));
}

/// Plans that are proven alone, but together are no set with one order of sums.
#[test]
fn plans_in_other_orders_are_not_proven_together() {
    let target = h200();
    let validated = kernel(&wide("families/qwen3").graph, &target);
    let plans = derive_alike(validated.schedule(), &target, &[16, 32, 64]).unwrap();
    assert_eq!(plans.len(), 3);
    let of = |rows: u32, form| derive(validated.schedule(), &target, form, rows).unwrap();
    let [few, some, most] = [0, 1, 2].map(|at| plans[at].clone());
    // Rows of a chunk have separate lanes.
    let chunk = of(128, Form::Chunk);
    // Rows have more parts if fewer of them share the SMs.
    let other = of(16, Form::Steps);
    let wave = other.waves.iter().zip(&most.waves).position(|(a, b)| a.sums != b.sums).expect("another order");
    let mut lies = other.clone();
    lies.waves[wave].sums = most.waves[wave].sums;
    for (plans, expected) in [
        (vec![], "alike: schedule: no plan"),
        (vec![chunk], "alike: schedule: a plan of chunks"),
        (vec![most.clone(), some.clone()], "alike: schedule: plans that do not ascend by rows"),
        (vec![some.clone(), some.clone()], "alike: schedule: plans that do not ascend by rows"),
        (vec![other, most.clone()], "alike: w"),
        (vec![lies, most.clone()], "sums: w"),
    ] {
        let rules = prove_alike(plans, &validated, &target).unwrap_err();
        assert!(rules[0].to_string().starts_with(expected), "{expected}: {}", listed(&rules));
    }
    for plans in [vec![few.clone()], vec![few, some, most]] {
        prove_alike(plans, &validated, &target).unwrap_or_else(|rules| panic!("{}", listed(&rules)));
    }
}

#[test]
fn a_wrong_plan_has_no_proof() {
    let names = ["families/gemma3", "families/starcoder2", "families/qwen3"];
    let count: usize = names.into_iter().map(|name| judge_mutants(name, &small(), Form::Chunk, 256)).sum();
    assert!(count > 3000, "{count} mutants");
}

/// Branches of norms in parts, no parts at all, and addends; on all SMs the heads are in parts, too.
#[test]
fn a_wrong_plan_of_steps_has_no_proof() {
    let mut count = 0;
    for (name, target, rows) in [
        ("families/gemma3", small(), 32),
        ("families/starcoder2", small(), 64),
        ("families/qwen3", small(), 16),
        ("families/qwen3", h200(), 64),
    ] {
        count += judge_mutants(name, &target, Form::Steps, rows);
    }
    assert!(count > 3000, "{count} mutants");
}

/// On few SMs products have whole units. Those of 32 rows hold four chunks. Those of 64 rows hold none, but may hold one.
#[test]
fn a_wrong_plan_that_holds_weights_has_no_proof() {
    let mut count = 0;
    for (name, rows) in [("families/qwen3", 32), ("families/gemma3", 64)] {
        let (imported, target) = (of_width(name, HOLDING_COLS), small());
        let validated = kernel(&imported.graph, &target);
        let of = proven(&validated, &target, Form::Steps, rows).unwrap().plan().clone();
        let mut mutants = Mutants { of: &of, program: &validated.schedule().program, made: vec![] };
        for w in (0..of.waves.len()).filter(|w| matches!(of.waves[*w].action, Action::MatMul { .. })) {
            mutants.held(w);
        }
        mutants.matmul(1, "another chunk held", (rows == 32).then_some("ring"), |m| m.held += 1);
        count += judge(name, &imported, &validated, &target, mutants, &tokens(&imported, rows + 3));
    }
    assert!(count > 90, "{count} mutants");
}

/// Each rule of held chunks finds what no other rule does.
#[test]
fn products_hold_no_other_weights() {
    let plain = of_width("families/gemma3", HOLDING_COLS);
    let coded = rounded(of_width("families/gemma3", HOLDING_COLS), &all(named("int8")));
    for (imported, target, (form, rows), held, what) in [
        (&plain, small(), (Form::Chunk, 512), 1, "outside a step"),
        (&coded, small(), (Form::Steps, 32), 4, "that are codes"),
        (&plain, h200(), (Form::Steps, 32), 1, "of a part of k"),
        (&plain, small(), (Form::Steps, 32), 8, "as many as the ring has"),
        (&plain, small(), (Form::Steps, 32), 3, "that end inside a chunk of the input"),
        (&plain, small(), (Form::Steps, 32), 6, "that are more than a unit has"),
        (&plain, small(), (Form::Steps, 64), 2, "that registers have no room for beside the sums"),
    ] {
        let validated = kernel(&imported.graph, &target);
        let mut plan = proven(&validated, &target, form, rows).unwrap().plan().clone();
        let Action::MatMul { held: now, .. } = &mut plan.waves[1].action else { panic!("a product") };
        *now = held;
        let violations = prove(plan, &validated, &target).expect_err(what);
        let text = format!("{held} chunks held {what}");
        assert!(violations.len() == 1 && violations[0].message == text, "{what}: {}", listed(&violations));
    }
}

/// Products are tiles where that pays, on a target with the instruction: gated ones of plain weights of 64 rows, all of 128 rows, and of codes of 4 bits of 32 rows
/// all products of an MLP.
#[test]
fn products_are_tiles_where_that_pays() {
    let (none, gated, mlp): (&[&str], &[&str], &[&str]) = (&[], &["gate_up"], &["gate_up", "down"]);
    // The output of attention and the vocabulary fill too few.
    let filled: &[&str] = &["qkv", "gate_up", "down"];
    let plain = filling("families/qwen3");
    let [int4, int8] = ["int4:32", "int8"].map(|format| rounded(filling("families/qwen3"), &all(named(format))));
    let not_gated = of_size("families/starcoder2", 128, Some(1152));
    let not_gated_int4 = rounded(of_size("families/starcoder2", 128, Some(1152)), &all(named("int4:32")));
    let mut without = Target::builtin("b200").unwrap();
    without.spec.sm_count = 12;
    for (imported, target, (form, rows), expected) in [
        (&plain, small(), (Form::Steps, 64), gated),
        (&plain, small(), (Form::Steps, 32), none),
        (&plain, small(), (Form::Steps, 128), filled),
        (&int4, small(), (Form::Steps, 128), none),
        (&int4, small(), (Form::Steps, 32), mlp),
        (&int4, small(), (Form::Steps, 64), none),
        (&int4, small(), (Form::Steps, 16), none),
        (&int8, small(), (Form::Steps, 32), none),
        (&plain, without.clone(), (Form::Steps, 64), none),
        (&int4, without, (Form::Steps, 32), none),
        (&not_gated, small(), (Form::Steps, 64), none),
        (&not_gated_int4, small(), (Form::Steps, 32), &["up"]),
        (&plain, small(), (Form::Chunk, 512), none),
        (&int4, small(), (Form::Tail, 16), none),
        // More SMs have fewer units each, which fill no tiles.
        (&plain, h200(), (Form::Steps, 64), none),
        (&int4, h200(), (Form::Steps, 32), none),
    ] {
        let validated = kernel(&imported.graph, &target);
        let proven = proven(&validated, &target, form, rows).unwrap();
        let (waves, program) = (&proven.plan().waves, &validated.schedule().program);
        let name = |w: &usize| program.grids[waves[*w].grid.index()].name.as_str();
        let is_tiles = |w: &usize| {
            matches!(waves[*w].action, Action::MatMul { .. }) && expected.iter().any(|of| name(w).starts_with(of))
        };
        let expected: Vec<usize> = (0..waves.len()).filter(is_tiles).collect();
        assert_eq!(tile_waves(proven.plan()), expected, "{form:?} of {rows} on {}", target.name);
    }
}

/// Tiles of plain weights, and of codes in two groups of k, too.
#[test]
fn a_wrong_plan_of_tiles_has_no_proof() {
    let (name, target) = ("families/qwen3", small());
    let mut count = 0;
    let plain = FormatPlan::default;
    for (formats, rows, tiles) in [(plain(), 64, 1), (plain(), 128, 3), (all(named("int4:32")), 32, 2)] {
        let mut imported = rounded(filling(name), &formats);
        imported.graph.layers.truncate(1);
        let validated = kernel(&imported.graph, &target);
        let of = proven(&validated, &target, Form::Steps, rows).unwrap().plan().clone();
        let mut mutants = Mutants { of: &of, program: &validated.schedule().program, made: vec![] };
        assert_eq!(tile_waves(&of).len(), tiles);
        mutants.attributes();
        mutants.sums();
        count += judge(name, &imported, &validated, &target, mutants, &tokens(&imported, rows + 3));
    }
    assert!(count > 600, "{count} mutants");
}

/// Asserts that the plan of a model on `target` after `change` of a wave breaks the rule of tiles `what` in this wave and, if `alone`, no other rule. The wave
/// is the first one whose product is gated, or is not.
fn no_tiles(
    (imported, target, (form, rows)): (&Imported, Target, (Form, u32)),
    is_gated: bool,
    change: impl FnOnce(&mut Plan, &Program, usize),
    (what, alone): (&str, bool),
) {
    let validated = kernel(&imported.graph, &target);
    let is_of = |program: &Program, wave: &Wave| is_product(program, wave, is_gated);
    breaks_rule_of_tiles(&validated, (&target, form, rows), is_of, change, (what, alone));
}

/// The same of the first wave that `is_of` the product asked for.
fn breaks_rule_of_tiles(
    validated: &Validated,
    (target, form, rows): (&Target, Form, u32),
    is_of: impl Fn(&Program, &Wave) -> bool,
    change: impl FnOnce(&mut Plan, &Program, usize),
    (what, alone): (&str, bool),
) {
    let program = &validated.schedule().program;
    let mut plan = proven(validated, target, form, rows).unwrap().plan().clone();
    let w = plan.waves.iter().position(|wave| is_of(program, wave)).expect("a product");
    change(&mut plan, program, w);
    let violations = prove(plan, validated, target).expect_err(what);
    let named =
        |of: &Violation| (of.entity, of.rule, of.message.as_str()) == (Entity::Wave(w as u32), Rule::Ring, what);
    assert!(violations.iter().any(named), "{what}: {}", listed(&violations));
    assert!(violations.len() == 1 || !alone, "{what}: {}", listed(&violations));
}

/// Whether a wave multiplies, and its product is gated as asked.
fn is_product(program: &Program, wave: &Wave, is_gated: bool) -> bool {
    let Op::MatVec(m) = &program.grids[wave.grid.index()].op else { return false };
    matches!(wave.action, Action::MatMul { .. }) && matches!(m.epilogue, Epilogue::Gated(_)) == is_gated
}

/// Products that are no tiles. Of a division in parts, and of a chunk, more than one rule is broken.
#[test]
fn other_products_are_no_tiles() {
    let (plain, odd) = (filling("families/qwen3"), of_size("families/qwen3", 672, Some(576)));
    let coded = rounded(filling("families/qwen3"), &all(named("int4:32")));
    for (imported, target, (form, rows), is_gated, what, alone) in [
        (&plain, small(), (Form::Steps, 16), true, "of 16 rows, for which there is no instruction", true),
        (&plain, small(), (Form::Chunk, 256), true, "outside a step", false),
        (&coded, small(), (Form::Steps, 128), true, "of codes and 128 rows", false),
        (
            &odd,
            small(),
            (Form::Steps, 64),
            true,
            "expected chunks of 64 of k, or of a granule of codes or of several tiles, for each group of k",
            true,
        ),
    ] {
        no_tiles((imported, target, (form, rows)), is_gated, in_tiles, (&format!("tiles: {what}"), alone));
    }
}

/// A change of how a wave multiplies.
type ChangeOf = fn(&mut Product);

/// Each rule of tiles finds what no other rule does. Waves that are no tiles want another ring and another scratch, too.
#[test]
fn products_are_no_other_tiles() {
    let plain = filling("families/qwen3");
    let coded = rounded(filling("families/qwen3"), &all(named("int4:32")));
    let chunks = "expected chunks of 64 of k, or of a granule of codes or of several tiles, for each group of k";
    let changes: [(_, u32, ChangeOf, _); 5] = [
        (&plain, 64, |m| m.warps = Warps { rows: 2, units: 8, k: 1 }, "expected two units of a tile for each warp"),
        (&coded, 32, |m| m.pass = 22, "12672 bytes of a pass of 22 units, which no slot holds"),
        (&plain, 64, |m| m.pass = 0, "expected 1 to 32 sums of a lane, found 0"),
        (&plain, 64, |m| m.chunk = 1, chunks),
        (&coded, 32, |m| (m.pass, m.chunk) = (8, 2), chunks),
    ];
    for (imported, rows, change, what) in changes {
        let of = (imported, small(), (Form::Steps, rows));
        no_tiles(of, true, |p, _, w| change_product(p, w, change), (&format!("tiles: {what}"), true));
    }
    let of = || (&plain, small(), (Form::Steps, 64));
    no_tiles(of(), true, |p, _, w| change_product(p, w, |m| m.held = 4), ("4 chunks held of tiles", true));
    let larger = |p: &mut Plan, _: &Program, w| {
        change_product(p, w, |m| m.pass = 17);
        (p.machine.weights.slots, p.machine.weights.slot_bytes) = (3, 32_768);
    };
    no_tiles(of(), true, larger, ("tiles: expected 1 to 32 sums of a lane, found 64", true));
    let three_tiles = |p: &mut Plan, _: &Program, w| {
        change_product(p, w, |m| (m.pass, m.chunk) = (33, 1));
        (p.machine.weights.slots, p.machine.weights.slot_bytes) = (2, 24_576);
    };
    let of_128 = || (&plain, small(), (Form::Steps, 128));
    no_tiles(of_128(), true, three_tiles, ("tiles: expected 1 to 128 sums of a lane, found 192", true));
    // Two tiles of 128 rows want a granule at a time.
    let two_tiles = |p: &mut Plan, _: &Program, w| {
        change_product(p, w, |m| m.pass = 17);
        (p.machine.weights.slots, p.machine.weights.slot_bytes) = (2, 32_768);
    };
    no_tiles(of_128(), true, two_tiles, (&format!("tiles: {chunks}"), true));
    // As the waves before want them, too.
    let before_in_twos = |p: &mut Plan, program: &Program, w: usize| {
        for before in 0..w {
            if is_product(program, &p.waves[before], false) {
                change_product(p, before, |m| (m.chunk, m.warps) = (2, Warps { rows: 4, units: 2, k: 1 }));
            }
        }
    };
    let three = |p: &mut Plan, program: &Program, w| {
        (p.machine.inputs.slots, p.machine.inputs.slot_bytes) = (3, 24_576);
        before_in_twos(p, program, w);
    };
    let what = "tiles: 3 chunks of weights of a chunk of the input, expected one or an even number";
    no_tiles(of(), true, three, (what, false));
    let half = |p: &mut Plan, program: &Program, w| {
        change_product(p, w, |m| (m.pass, m.chunk, m.warps) = (8, 4, Warps { rows: 1, units: 4, k: 2 }));
        (p.machine.inputs.slots, p.machine.inputs.slot_bytes) = (3, 24_576);
        before_in_twos(p, program, w);
    };
    let what = "tiles: chunks of 6 spans of the input, which are not whole chunks of 4";
    no_tiles(of(), true, half, (what, false));
    // All units of a tile are read of plain weights.
    let short = |p: &mut Plan, program: &Program, w| {
        change_product(p, w, |m| m.pass = 1);
        p.machine.weights.slot_bytes = 8192;
        before_in_twos(p, program, w);
    };
    no_tiles(of(), true, short, ("tiles: 16384 bytes of a pass of 1 units, which no slot holds", false));
    let less = |p: &mut Plan, _: &Program, w| {
        p.machine.scratch_bytes = 15_360;
        for wave in &mut p.waves[..w] {
            if let Sums::History { scratch_bytes, .. } = &mut wave.sums {
                *scratch_bytes = 15_360;
            }
        }
    };
    no_tiles(of(), true, less, ("tiles: sums of warps that no scratch holds", false));
}

/// Products of three parts of k of which the last one is empty.
#[test]
fn products_of_empty_parts_are_no_tiles() {
    let target = small();
    let validated = kernel(&wide("families/qwen3").graph, &target);
    let of = (&target, Form::Steps, 64);
    let heads = |program: &Program, wave: &Wave| is_product(program, wave, false);
    let in_three_parts = |p: &mut Plan, program: &Program, w: usize| {
        in_tiles(p, program, w);
        p.waves[w].division = DivisionId::from(p.divisions.len());
        let Op::MatVec(m) = &program.grids[p.waves[w].grid.index()].op else { panic!("a product") };
        let n = m.units();
        let of_part = |part| vec![Share { row: 0, rows: 64, lo: part * n, hi: (part + 1) * n }];
        let mut shares: Vec<Vec<Share>> = (0..3).map(of_part).collect();
        shares.resize(p.machine.sms as usize, vec![]);
        p.divisions.push(Division { over: Over::Units { n, parts: 3, step: 1 }, shares: vec![shares] });
        let Action::MatMul { target: Written::Out(out), .. } = p.waves[w].action else { panic!("heads") };
        p.work[out.index()].place = p.work_bytes().next_multiple_of(256);
        p.work[out.index()].layout = Layout::Parts(3);
    };
    breaks_rule_of_tiles(&validated, of, heads, in_three_parts, ("tiles: a part of k that is empty", false));
}

/// A target without the instruction, and plans of tiles for two numbers of rows.
#[test]
fn tiles_are_for_their_target_and_their_number_of_rows() {
    let target = small();
    let validated = kernel(&filling("families/qwen3").graph, &target);
    let most = derive(validated.schedule(), &target, Form::Steps, 64).unwrap();
    let mut without = target.clone();
    without.spec.warpgroup_mma = false;
    let violations = prove(most, &validated, &without).unwrap_err();
    let expected = "machine: schedule: tiles, which warpgroups multiply and the target lacks
";
    assert_eq!(listed(&violations), expected);
    // In one order, apart from what is not known of tiles.
    let mut alike = derive_alike(validated.schedule(), &target, &[32, 64]).unwrap();
    for plan in &mut alike {
        let program = &validated.schedule().program;
        let gated = plan.waves.iter().position(|wave| is_product(program, wave, true));
        in_tiles(plan, program, gated.expect("a gated product"));
        prove(plan.clone(), &validated, &target).unwrap_or_else(|rules| panic!("{}", listed(&rules)));
    }
    let violations = prove_alike(alike, &validated, &target).map(drop).unwrap_err();
    let expected = "alike: w5: tiles of 32 and of 64 rows, which may add up in other orders
";
    assert_eq!(listed(&violations), expected);
}

/// With histories in KV splits: the wave that adds up is dropped, comes first or twice, adds up other splits, or splits share their places.
#[test]
fn a_wrong_plan_in_splits_has_no_proof() {
    let count = judge_mutants_in("families/qwen3", &small(), Form::Steps, 32, Some(64));
    assert!(count > 800, "{count} mutants");
}

/// A tail follows a prompt, which has one history: no kernel of it takes splits.
#[test]
fn a_tail_in_splits_has_no_proof() {
    let target = small();
    let validated = kernel(&wide("families/qwen3").graph, &target);
    let mut tail = proven(&validated, &target, Form::Tail, 16).unwrap().plan().clone();
    let steps = proven_in_splits(&validated, &target, 16, 64);
    let merge = |wave: &&Wave| matches!(wave.action, Action::Merge { .. });
    let Some(Action::Merge { splits, .. }) = steps.plan().waves.iter().find(merge).map(|wave| &wave.action) else {
        panic!("no history is cut")
    };
    let left =
        Work { place: tail.work_bytes().next_multiple_of(256), ..steps.plan().work[splits.left.index()].clone() };
    let splits = Splits { left: WorkId::from(tail.work.len()), ..*splits };
    tail.work.push(left);
    let at = tail.waves.iter().position(|wave| matches!(wave.action, Action::AttendRow { .. })).unwrap();
    let mut merge = tail.waves[at].clone();
    let attends = &mut tail.waves[at];
    let Action::AttendRow { out, splits: of_attends, .. } = &mut attends.action else { unreachable!() };
    (*of_attends, merge.action, merge.sums) =
        (Some(splits), Action::Merge { out: *out, splits, gate: None }, Sums::Splits { positions: splits.positions });
    if let Sums::History { split, .. } = &mut attends.sums {
        *split = Some(splits.positions);
    }
    tail.waves.insert(at + 1, merge);
    let chunk = proven(&validated, &target, Form::Chunk, 256).unwrap();
    let violations = prove_tail(tail, chunk, &target).expect_err("a tail in splits");
    assert!(
        violations.len() == 1 && violations[0].message.ends_with("splits of what is no step"),
        "{}",
        listed(&violations)
    );
}

/// After a norm of a branch and after a product that adds, with heads in parts and whole.
#[test]
fn a_wrong_tail_has_no_proof() {
    let mut count = 0;
    for (name, target) in [("families/gemma3", small()), ("families/qwen3", small()), ("families/qwen3", h200())] {
        count += judge_mutants(name, &target, Form::Tail, 16);
    }
    assert!(count > 1000, "{count} mutants");
}

// ---- the second judge -------------------------------------------------------------------------------------------------

pub fn tokens(imported: &Imported, count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * i * 7 + i * 13 + 5) % imported.graph.vocab).collect()
}

/// A plan has the keys, values and states of its model, for a text in chunks that end at `ends`.
#[track_caller]
pub fn computes(name: &str, imported: &Imported, proven: &Proven<'_>, ends: &[usize], seed: u64) {
    let text = tokens(imported, ends[ends.len() - 1] as u32);
    let mut begin = 0;
    let chunks: Vec<&[u32]> = ends.iter().map(|&end| &text[std::mem::replace(&mut begin, end)..end]).collect();
    let found = execute(&proven.validated().schedule().program, imported, proven.plan(), &chunks, seed);
    let difference = difference(&expected(imported, &text), &found);
    assert!(difference < TOLERANCE, "{name}: {difference:e}");
}

/// [`computes`] of a plan of chunks, and the same of one of steps and of one with a tail.
pub fn every_form_computes(name: &str, imported: &Imported, ends: &[usize], seed: u64) {
    let target = small();
    let validated = kernel(&imported.graph, &target);
    let of_chunk = proven(&validated, &target, Form::Chunk, 512).unwrap_or_else(|why| panic!("{name}: {why}"));
    computes(name, imported, &of_chunk, ends, seed);
    let of_steps = proven(&validated, &target, Form::Steps, 32).unwrap();
    run_steps(imported, &validated, of_steps.plan(), seed);
    let both = with_tail(&validated, &target, 256, 16).unwrap();
    run_tail(imported, &both, &tokens(imported, 40), &[1, 34, 40], seed);
}

#[test]
fn a_proven_plan_computes_keys_and_values_of_its_model() {
    let mut models = 0u64;
    let variants = ["gemma-bias", "granite-bias", "qwen3-bias-swa", "smollm3-window"];
    let variants = variants.map(|name| format!("variants/{name}"));
    for name in checkpoints("families").into_iter().chain(variants) {
        let (_folder, imported) = stored(&wide(&name));
        let text = tokens(&imported, 200);
        let all = expected(&imported, &text);
        // Few SMs have several units each; those of the record have one, or none.
        let whole = ["families/gemma3", "families/starcoder2"].contains(&name.as_str());
        for (target, count) in [(small(), 200), (h200(), 140)].into_iter().take(1 + usize::from(whole)) {
            let validated = kernel(&imported.graph, &target);
            let Ok(proven) = proven(&validated, &target, Form::Chunk, 512) else { continue };
            models += 1;
            // Chunks of one row, of a block and two rows, and of the rest.
            let (one, rest) = text[..count].split_at(1);
            let (some, rest) = rest.split_at(130);
            let program = &validated.schedule().program;
            let found = execute(program, &imported, proven.plan(), &[one, some, rest], 3 + models);
            let known: Vec<_> = all.iter().map(|of| of.clone().map(|rows| rows[..count].to_vec())).collect();
            let difference = difference(&known, &found);
            assert!(difference < TOLERANCE, "{name} on {} SMs: {difference:e}", target.spec.sm_count);
        }
    }
    assert!(models >= 21, "{models} models");
}

/// Columns within an MLP of which `down` has parts of k in a chunk: four in a launch of one block, two in one of two, one in one of three.
const DIVIDED: u32 = 1152;

/// Most parts of k of a product.
fn parts_of_k(plan: &Plan) -> u32 {
    let parts = |division: &Division| if let Over::Units { parts, .. } = division.over { parts } else { 1 };
    plan.divisions.iter().map(parts).max().unwrap_or(1)
}

#[test]
fn launches_of_more_blocks_have_fewer_parts_of_k() {
    let (_folder, imported) = stored(&of_size("families/llama-gqa", 128, Some(DIVIDED)));
    let validated = kernel(&imported.graph, &small());
    let proven = proven(&validated, &small(), Form::Chunk, 512).unwrap();
    assert_eq!(parts_of_k(proven.plan()), 4);
    let text = tokens(&imported, 500);
    let all = expected(&imported, &text);
    let (one, rest) = text.split_at(100);
    let (two, three) = rest.split_at(140);
    let found = execute(&validated.schedule().program, &imported, proven.plan(), &[one, two, three], 5);
    let difference = difference(&all, &found);
    assert!(difference < TOLERANCE, "{difference:e}");
}

/// The tokens that the reference decides after `text`, one after another, and the keys and values of all tokens except the last.
fn decoded(imported: &Imported, text: &[u32], count: usize) -> (Vec<u32>, Vec<[Rows; 2]>) {
    let mut session = Session::new(&imported.graph, &imported.weights);
    let (last, before) = text.split_last().unwrap();
    before.iter().for_each(|&token| drop(session.step_hidden(token)));
    let mut tokens = vec![*last];
    while tokens.len() <= count {
        let logits = session.step(*tokens.last().unwrap());
        tokens.push(argmax(&logits));
    }
    (tokens, cached_by(&session, &imported.graph))
}

/// Three sequences of different lengths are read, one of them while the others decode; then all decode together for some steps.
pub fn run_steps(imported: &Imported, validated: &Validated, plan: &Plan, seed: u64) {
    let program = &validated.schedule().program;
    let texts: Vec<Vec<u32>> = [(11, 3), (2, 40), (6, 7)]
        .map(|(count, from)| tokens(imported, from + count)[from as usize..].to_vec())
        .to_vec();
    let lengths: Vec<usize> = texts.iter().map(|text| text.len() + 4).collect();
    let mut executor = Executor::new(program, imported, plan, &lengths, seed);
    let given = |sequence: usize, range: std::ops::Range<usize>| -> Vec<Row> {
        let row = |position| Row { sequence, position, first: First::Given(texts[sequence][position]) };
        range.map(row).collect()
    };
    // The ends of two texts decide while the third is read in two runs, the second one among rows that decode.
    let first = [given(2, 0..2), given(0, 0..11), given(1, 0..2)].concat();
    let all = executor.launch(&first, 1);
    let decides = |row: usize, launched: &[Vec<Option<u32>>]| launched.last().unwrap()[row].expect("a token");
    let (zero, one) = (decides(12, &all), decides(14, &all));
    let on = |sequence: usize, from: usize, more: usize| Row {
        sequence,
        position: texts[sequence].len() + more,
        first: First::Decided(from),
    };
    let second = [vec![on(1, 14, 0)], given(2, 2..6), vec![on(0, 12, 0)]].concat();
    let then = executor.launch(&second, 1);
    assert_eq!((then[0][0], then[0][5]), (Some(one), Some(zero)), "tokens of the launch before");
    let third = [on(0, 5, 1), on(2, 4, 0), on(1, 0, 1)];
    let last = executor.launch(&third, 3);
    assert_eq!(last.len(), 4);
    for (sequence, row) in [(0, 0), (2, 1), (1, 2)] {
        let mut found: Vec<u32> = last.iter().map(|step| step[row].expect("a token")).collect();
        match sequence {
            0 => found.insert(0, zero),
            1 => found.insert(0, one),
            _ => {}
        }
        let (decided, cached) = decoded(imported, &texts[sequence], found.len());
        assert_eq!(found, decided[1..], "sequence {sequence}");
        let known = texts[sequence].len() + found.len() - 1;
        let at = |of: Vec<[Rows; 2]>| -> Vec<[Rows; 2]> {
            // States have a row for each head.
            of.into_iter().map(|of| of.map(|rows| rows[..known.min(rows.len())].to_vec())).collect()
        };
        let difference = difference(&at(cached), &at(executor.cached(sequence)));
        assert!(difference < TOLERANCE, "sequence {sequence}: {difference:e}");
    }
}

#[test]
fn a_proven_plan_of_steps_decides_what_its_model_does() {
    let mut models = 0u64;
    let variants = ["gemma-bias", "granite-bias", "qwen3-bias-swa", "smollm3-window"];
    let variants = variants.map(|name| format!("variants/{name}"));
    for name in checkpoints("families").into_iter().chain(variants) {
        let (_folder, imported) = stored(&wide(&name));
        let rows = [16, 32, 64][models as usize % 3];
        for target in [small(), h200()] {
            let validated = kernel(&imported.graph, &target);
            let Ok(proven) = proven(&validated, &target, Form::Steps, rows) else { continue };
            run_steps(&imported, &validated, proven.plan(), 3 + models);
            models += 1;
        }
    }
    assert!(models >= 40, "{models} models");
}

/// Steps whose histories are cut, of windows of more than a split, too.
#[test]
fn a_proven_plan_in_splits_computes_its_model() {
    let window = Toy { heads: 2, kv_heads: 1, dim: 64, context: 512, window: Some(100), ..TOY };
    let toy = |toy: Toy| {
        let graph = toy.graph();
        let weights = Weights::synthetic(&graph, 5);
        Imported { weights, graph, header_bytes_read: 0, config_text: String::new(), notes: vec![] }
    };
    for (imported, split) in [(wide("families/gemma3"), 64), (wide("families/qwen3"), 128), (toy(window), 64)] {
        let target = small();
        let validated = kernel(&imported.graph, &target);
        let steps = proven_in_splits(&validated, &target, 64, split);
        let text = tokens(&imported, 270);
        let keys_and_values = expected(&imported, &text);
        // Lengths of a split less one, a split, one more, and of several.
        for (seed, cuts) in [(1, vec![63, 1, 1, 62, 1, 64, 64, 14]), (2, vec![64, 64, 1, 63, 64, 14])] {
            let mut rest = text.as_slice();
            let mut chunks = vec![];
            for cut in cuts {
                let (chunk, after) = rest.split_at(cut);
                chunks.push(chunk);
                rest = after;
            }
            assert!(rest.is_empty());
            let found = execute(&validated.schedule().program, &imported, steps.plan(), &chunks, seed);
            let difference = difference(&keys_and_values, &found);
            assert!(difference < TOLERANCE, "{}, seed {seed}: {difference:e}", imported.graph.family);
        }
    }
}

/// The executor sees what a plan in splits leaves out, does too early, or does in places of other splits.
#[test]
fn a_wrong_plan_in_splits_computes_something_else() {
    let ((_folder, imported), target) = (stored(&wide("families/qwen3")), small());
    let validated = kernel(&imported.graph, &target);
    let program = &validated.schedule().program;
    let of = proven_in_splits(&validated, &target, 64, 64).plan().clone();
    let text = tokens(&imported, 200);
    let keys_and_values = expected(&imported, &text);
    let chunks: Vec<&[u32]> = text.chunks(40).collect();
    let differs = |plan: &Plan| difference(&keys_and_values, &execute(program, &imported, plan, &chunks, 5));
    assert!(differs(&of) < TOLERANCE);
    let merge = of.waves.iter().position(|wave| matches!(wave.action, Action::Merge { .. })).unwrap();
    let Action::Merge { splits, .. } = of.waves[merge].action else { unreachable!() };
    let mut mutants = Mutants { of: &of, program, made: vec![] };
    mutants.add("no merge", None, |p| {
        p.waves.remove(merge);
    });
    mutants.add("a merge before its attention", None, |p| p.waves.swap(merge - 1, merge));
    mutants.add("a merge after the product", None, |p| p.waves.swap(merge, merge + 1));
    mutants.add("a merge of longer splits", None, |p| {
        let Action::Merge { splits, .. } = &mut p.waves[merge].action else { unreachable!() };
        splits.positions *= 2;
    });
    mutants.add("rows that share places", None, |p| {
        p.work[splits.left.index()].layout = Layout::Splits(1);
    });
    for Mutant { name, plan, .. } in mutants.made {
        let found = differs(&plan);
        assert!(found > 1e-4, "{name}: {found:e}");
    }
}

/// The executor sees each meeting that is left out: no wave finds what the wave before it writes.
#[test]
fn a_plan_without_one_of_its_meetings_computes_something_else() {
    let ((_folder, imported), target) = (stored(&wide("families/qwen3")), h200());
    let validated = kernel(&imported.graph, &target);
    let program = &validated.schedule().program;
    let of = proven(&validated, &target, Form::Steps, 32).unwrap().plan().clone();
    let text = tokens(&imported, 40);
    let keys_and_values = expected(&imported, &text);
    let differs =
        |plan: &Plan| difference(&keys_and_values, &execute(program, &imported, plan, &[&text[..30], &text[30..]], 5));
    assert!(differs(&of) < TOLERANCE);
    assert!(of.waves.iter().any(|wave| !wave.meets));
    // Keys and values of the last layer do not depend on later waves.
    for w in (1..of.fills()).filter(|w| of.waves[*w].meets) {
        let mut plan = of.clone();
        plan.waves[w].meets = false;
        let found = differs(&plan);
        assert!(found.is_nan() || found > 1e-4, "w{w}: {found:e}");
    }
}

/// Reads a text in chunks that end at `ends`. Rows at the end of each chunk decide: one after the first chunk, one more after each later chunk.
/// Their tokens, keys and values must be those of the model.
pub fn run_tail(imported: &Imported, both: &WithTail<'_>, text: &[u32], ends: &[usize], seed: u64) {
    let (chunk, program) = (both.chunk().plan(), &both.tail().validated().schedule().program);
    let mut executor = Executor::new(program, imported, chunk, &[text.len()], seed);
    let mut session = Session::new(&imported.graph, &imported.weights);
    let decided: Vec<u32> = text.iter().map(|&token| argmax(&session.step(token))).collect();
    let mut begin = 0;
    for (more, &end) in ends.iter().enumerate() {
        let row = |position| Row { sequence: 0, position, first: First::Given(text[position]) };
        executor.launch(&(begin..end).map(row).collect::<Vec<_>>(), 1);
        let row = |position: usize| Row { sequence: 0, position, first: First::Decided(position - begin) };
        let rows: Vec<Row> = (begin.max(end - 1 - more)..end).map(row).collect();
        let found = executor.end(both.tail().plan(), both.taken(), &rows);
        let expected: Vec<Option<u32>> = rows.iter().map(|row| Some(decided[row.position])).collect();
        assert_eq!(found, expected, "rows up to {end}");
        begin = end;
    }
    let difference = difference(&cached_by(&session, &imported.graph), &executor.cached(0));
    assert!(difference < TOLERANCE, "{difference:e}");
}

#[test]
fn a_proven_tail_decides_what_its_model_does() {
    let mut models = 0u64;
    let variants = ["gemma-bias", "granite-bias", "qwen3-bias-swa", "smollm3-window"];
    let variants = variants.map(|name| format!("variants/{name}"));
    for name in checkpoints("families").into_iter().chain(variants) {
        let (_folder, imported) = stored(&wide(&name));
        let text = tokens(&imported, 150);
        for target in [small(), h200()] {
            let validated = kernel(&imported.graph, &target);
            let Ok(both) = with_tail(&validated, &target, 256, 16) else { continue };
            // A chunk of one row, of more than a block, and the rest; so the last rows of a chunk are in either block.
            run_tail(&imported, &both, &text, &[1, 134, 150], 3 + models);
            models += 1;
        }
    }
    assert!(models >= 40, "{models} models");
}

/// Plans that are proven alone, but of which one is no tail of the other.
#[test]
fn a_tail_is_proven_after_its_chunk_alone() {
    let target = h200();
    let graph = wide("families/qwen3").graph;
    let validated = kernel(&graph, &target);
    let mut longer = graph.clone();
    longer.layers.push(graph.layers[0].clone());
    let other = kernel(&longer, &target);
    let tail = derive(validated.schedule(), &target, Form::Tail, 16).unwrap();
    let of = |form, rows| proven(&validated, &target, form, rows).unwrap();
    let chunk = of(Form::Chunk, 256);
    // A tail that begins a layer early: its residual was overwritten.
    let grids = validated.schedule().program.grids.iter().enumerate();
    let attention: Vec<usize> = grids.filter(|(_, grid)| matches!(grid.op, Op::Attention(_))).map(|(g, _)| g).collect();
    let per_layer = attention[1] - attention[0];
    let mut early = tail.clone();
    early.waves.iter_mut().for_each(|wave| wave.grid.0 -= per_layer as u32);
    let violations = |tail: &Plan, before: Proven<'_>| prove_tail(tail.clone(), before, &target).unwrap_err();
    for (violations, expected) in [
        (prove(tail.clone(), &validated, &target).unwrap_err(), "order: w0: a tail without its chunk"),
        (violations(&tail, of(Form::Steps, 32)), "tail: schedule: expected a plan of chunks before it"),
        (violations(&tail, of(Form::Tail, 16)), "tail: schedule: expected a plan of chunks before it"),
        (violations(chunk.plan(), chunk.clone()), "tail: schedule: expected a plan of a tail"),
        (violations(&early, chunk.clone()), "order: w0: expected the grid after g"),
        (violations(&tail, proven(&other, &target, Form::Chunk, 256).unwrap()), "order: w0: expected the grid"),
    ] {
        assert!(violations[0].to_string().starts_with(expected), "{expected}: {}", listed(&violations));
    }
    // The result does not depend on the number of rows of a chunk.
    for rows in [128, 512] {
        prove_tail(tail.clone(), of(Form::Chunk, rows), &target).unwrap_or_else(|found| panic!("{}", listed(&found)));
    }
}

/// The executor notices work that a plan leaves out, does too early, or does twice.
#[test]
fn a_wrong_plan_computes_something_else() {
    let ((_folder, imported), target) = (stored(&wide("families/gemma3")), small());
    let validated = kernel(&imported.graph, &target);
    let program = &validated.schedule().program;
    let of = proven(&validated, &target, Form::Chunk, 256).unwrap().plan().clone();
    let text = tokens(&imported, 140);
    let keys_and_values = expected(&imported, &text);
    let differs = |plan: &Plan| difference(&keys_and_values, &execute(program, &imported, plan, &[&text], 5));
    assert!(differs(&of) < TOLERANCE);
    let mut mutants = Mutants { of: &of, program, made: vec![] };
    for w in 0..of.waves.len() {
        mutants.add(format!("w{w} dropped"), None, |p| {
            p.waves.remove(w);
        });
        if w + 1 < of.waves.len() {
            mutants.add(format!("w{w} after the next"), None, |p| p.waves.swap(w, w + 1));
        }
    }
    for d in 0..of.divisions.len() {
        // A share that has rows of the text.
        mutants.add(format!("a share of d{d} dropped"), None, |p| {
            let has = |share: &Share| share.row < text.len() as u32;
            let mut shares = p.divisions[d].shares[1].iter_mut();
            let (sm, at) = shares.find_map(|sm| sm.iter().position(has).map(|at| (sm, at))).expect("a share");
            sm.remove(at);
        });
    }
    let sums =
        of.waves.iter().position(|wave| matches!(wave.action, Action::Rows { sum: Some(Sum::Branch { .. }), .. }));
    mutants.add("a branch added twice", None, |p| p.waves.insert(sums.unwrap(), p.waves[sums.unwrap()].clone()));
    mutants.add("buffers that overlap", None, |p| p.work[1].place = p.work[0].place);
    assert!(mutants.made.len() > 40);
    for Mutant { name, plan, .. } in mutants.made {
        let found = differs(&plan);
        assert!(found > 1e-4, "{name}: {found:e}");
    }
}

// ---- the generated kernel ---------------------------------------------------------------------------------------------

/// Rows of a launch, and its steps.
type Launch = (Vec<abi::Row>, u32);

/// Rows of a sequence with these tokens, from a position on. `Err(from)`: the token that row `from` decided.
pub fn rows_of(sequence: u32, position: u32, tokens: &[Result<u32, u32>]) -> Vec<abi::Row> {
    let row = |(position, token): (u32, &Result<u32, u32>)| {
        let (token, from) = token.map_or_else(|from| (-1, from), |token| (token as i32, 0));
        abi::Row { sequence, position, token, from, slot: slot_of(sequence), ..bytemuck::Zeroable::zeroed() }
    };
    (position..).zip(tokens).map(row).collect()
}

/// Which states a sequence has: not those of its number in a launch.
pub fn slot_of(sequence: u32) -> u32 {
    7 - sequence
}

pub fn given(tokens: &[u32]) -> Vec<Result<u32, u32>> {
    tokens.iter().map(|token| Ok(*token)).collect()
}

/// The memory after a run of a generated kernel.
pub struct Ran {
    pub cache: Vec<u8>,
    /// The caches of the other devices.
    pub others: Vec<Vec<u8>>,
    /// The arena.
    pub work: Vec<u8>,
    /// For steps, the tokens of each row: those with which each step began, and those that the last one decided.
    pub tokens: Vec<i32>,
    /// The logits of each row in the last step of each launch, as bits.
    pub logits: Vec<u32>,
}

/// Runs the generated kernel for this CPU. `None` without a compiler. `pages` has the page of each block of positions of each sequence.
pub fn run_kernel(imported: &Imported, proven: &Proven<'_>, launches: &[Launch], pages: &[u32]) -> Option<Ran> {
    Some(Built::of(imported, proven, &[], &|_| ())?.run(launches, pages, None, None))
}

/// As [`run_kernel`], for a tail. `before`: the memory after its chunk, and the begin of its residual in that arena.
pub fn run_kernel_after(
    imported: &Imported,
    proven: &Proven<'_>,
    launches: &[Launch],
    pages: &[u32],
    (chunk, taken): (&Ran, u64),
) -> Option<Ran> {
    let built = Built::of(imported, proven, &[], &|_| ())?;
    Some(built.run(launches, pages, Some(&chunk.cache), Some(&chunk.work[taken as usize..])))
}

/// A generated kernel that was compiled for this CPU, with its tables and its pack.
pub struct Built {
    folder: tempfile::TempDir,
    work_bytes: u64,
    cache_bytes: u64,
    devices: u32,
}

impl Built {
    /// `None` without a compiler. `wrong`: what is replaced in headers of waves; `change` changes its tables.
    pub fn of(
        imported: &Imported,
        proven: &Proven<'_>,
        wrong: &[(&str, &str)],
        change: &dyn Fn(&mut WaveTables),
    ) -> Option<Built> {
        let schedule = proven.validated().schedule();
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        let text = emit(proven, &small().on_devices(schedule.machine.devices), Trace::Off).text;
        let (text, _) = text.split_once("extern \"C\"").expect("an entry point");
        put("generated.cuh", text.replace("#include \"monobloc_waves.cuh\"", "").as_bytes());
        let whole = pack(schedule, &imported.graph, &imported.weights).unwrap();
        for device in 0..schedule.machine.devices {
            let (mut tables, held) = (encode(proven, device), held(schedule, device));
            change(&mut tables);
            let mut own = vec![0u8; held.bytes as usize];
            for (range, at) in &held.ranges {
                let bytes = &whole[range.start as usize..range.end as usize];
                own[*at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            let name = |of: &str| if device == 0 { of.to_string() } else { format!("{of}{device}") };
            put(&name("waves"), bytemuck::cast_slice(&tables.waves));
            put(&name("shares"), bytemuck::cast_slice(&tables.shares));
            put(&name("records"), bytemuck::cast_slice(&tables.records));
            put(&name("boxes"), bytemuck::cast_slice(&tables.boxes));
            put(&name("caches"), bytemuck::cast_slice(&tables.caches));
            put(&name("pack"), if schedule.machine.devices == 1 { &whole } else { &own });
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut compiler = Command::new("c++");
        compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-I"]);
        if !wrong.is_empty() {
            fs::create_dir_all(folder.path().join("wrong/waves")).unwrap();
            let mut found = 0;
            const EVERY: &str = "waves/rows.cuh";
            let some = [
                "waves/experts.cuh",
                "waves/experts_shared.cuh",
                "waves/state.cuh",
                "waves/mix.cuh",
                "waves/scan.cuh",
                "waves/convolve.cuh",
            ];
            for name in some.into_iter().filter(|name| text.contains(name)).chain([EVERY]) {
                let mut header = fs::read_to_string(root.join("kernels").join(name)).unwrap();
                for (right, wrong) in wrong {
                    found += header.matches(right).count();
                    header = header.replace(right, wrong);
                }
                put(&format!("wrong/{name}"), header.as_bytes());
            }
            // A tail includes no header of states.
            assert!(found == wrong.len() || found == 0, "{wrong:?}: found {found} times");
            compiler.arg(folder.path().join("wrong")).arg("-I");
        }
        compiler.arg(root.join("kernels")).arg("-I").arg(folder.path()).arg(root.join("tests/it/waves_kernel.cc"));
        let output = compiler.arg("-o").arg(folder.path().join("program")).output().ok()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let cache_bytes = schedule.arena_bytes(Space::Cache);
        let devices = schedule.machine.devices;
        Some(Built { folder, work_bytes: proven.plan().work_bytes(), cache_bytes, devices })
    }

    /// Runs launches. `before`: the cache before them; `taken`: for a tail, the residual of its chunk.
    pub fn run(&self, launches: &[Launch], pages: &[u32], before: Option<&[u8]>, taken: Option<&[u8]>) -> Ran {
        let at = |name: &str| self.folder.path().join(name);
        let put = |name: &str, bytes: &[u8]| fs::write(at(name), bytes).unwrap();
        put("pages", bytemuck::cast_slice(pages));
        before.iter().for_each(|bytes| put("before", bytes));
        taken.iter().for_each(|bytes| put("taken", bytes));
        let rows: Vec<abi::Row> = launches.iter().flat_map(|(rows, _)| rows.iter().copied()).collect();
        put("rows", bytemuck::cast_slice(&rows));
        let mut program = Command::new(at("program"));
        program.arg(self.work_bytes.to_string()).arg(self.cache_bytes.to_string());
        program.args(launches.iter().flat_map(|(rows, steps)| [rows.len().to_string(), steps.to_string()]));
        let output = program.current_dir(self.folder.path()).output().unwrap();
        assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        let read = |name: &str| fs::read(at(name)).unwrap();
        let words = |name: &str| -> Vec<u32> {
            read(name).chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect()
        };
        let tokens = words("tokens").into_iter().map(|token| token as i32).collect();
        let others = (1..self.devices).map(|device| read(&format!("cache{device}"))).collect();
        Ran { cache: read("cache"), others, work: read("work"), tokens, logits: words("logits") }
    }
}

/// Keys and values of each layer and position, from the bytes of the cache.
pub fn cached(schedule: &Schedule, bytes: &[u8], page_of: &[u32], positions: usize) -> Vec<[Rows; 2]> {
    let shape = Shape::of(&schedule.program).unwrap();
    let (page_rows, pool_rows) = (shape.page_rows as usize, (shape.page_rows * shape.pages) as usize);
    let of = |(id, grid): (GridId, &Grid), a: &Attention, role: Role| -> Rows {
        let place = schedule.placement[grid.operand(role).unwrap().buffer.index()].unwrap() as usize;
        let (heads, dim) = (a.kv_heads() as usize, a.head_dim as usize);
        let swizzled = schedule.attention_variant(id).is_some_and(|variant| variant.swizzled);
        let value = |position: usize, head: usize, d: usize| {
            let row = head * pool_rows + page_of[position / page_rows] as usize * page_rows + position % page_rows;
            let piece = d as u32 / 8;
            let lies = if swizzled { swizzled_piece(position as u32, piece, 2 * dim as u32) } else { piece };
            let piece = lies as usize;
            let at = place + row * dim * 2 + piece * 16 + d % 8 * 2;
            f64::from(f32::from_bits(u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]])) << 16))
        };
        let row = |position| (0..heads * dim).map(|i| value(position, i / dim, i % dim)).collect();
        (0..positions).map(row).collect()
    };
    let layers = schedule.program.grids.iter().enumerate().filter_map(|(id, grid)| match &grid.op {
        Op::Attention(a) => Some([Role::AppendK, Role::AppendV].map(|role| of((GridId::from(id), grid), a, role))),
        _ => None,
    });
    layers.collect()
}

/// Fills keys and values of some positions in the last layer with NaN.
fn spoil_last_layer(schedule: &Schedule, bytes: &mut [u8], page_of: &[u32], positions: std::ops::Range<usize>) {
    let shape = Shape::of(&schedule.program).unwrap();
    let (page_rows, pool_rows) = (shape.page_rows as usize, (shape.page_rows * shape.pages) as usize);
    let grid = &schedule.program.grids[schedule.program.last_append().unwrap().index()];
    let Op::Attention(a) = &grid.op else { panic!("attention") };
    let row_bytes = a.head_dim as usize * 2;
    for role in [Role::AppendK, Role::AppendV] {
        let place = schedule.placement[grid.operand(role).unwrap().buffer.index()].unwrap() as usize;
        for (head, position) in (0..a.kv_heads() as usize).flat_map(|head| positions.clone().map(move |at| (head, at)))
        {
            let row = head * pool_rows + page_of[position / page_rows] as usize * page_rows + position % page_rows;
            bytes[place + row * row_bytes..][..row_bytes].fill(0xff);
        }
    }
}

/// The largest difference of keys or values of a position by their norm, as a device is judged.
pub fn worst_position(expected: &[[Rows; 2]], found: &[[Rows; 2]]) -> f64 {
    let mut most = 0.0f64;
    for (expected, found) in expected.iter().flatten().flatten().zip(found.iter().flatten().flatten()) {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let error = norm(&mut expected.iter().zip(found).map(|(e, f)| e - f)) / norm(&mut expected.iter().copied());
        most = if error.is_nan() { f64::INFINITY } else { most.max(error) };
    }
    most
}

/// The generated text, its tables and the pack, run block by block: heads with norms, norms after branches, windows and capped scores; LayerNorm, biases
/// and plain activations; heads of 64 and of 128 dimensions, more positions than a tile has, and a last tile that is not full. bf16 rounds each
/// activation to 2^-9 of itself.
#[test]
fn a_generated_kernel_computes_keys_and_values_of_its_model() {
    // With the parts of k that `down` has in a launch of one block.
    for (name, hidden, within, count, parts) in [
        ("families/gemma3", 128, None, 140, 1),
        ("families/gemma2", 128, None, 70, 1),
        ("families/starcoder2", 256, None, 70, 1),
        ("families/llama-gqa", 128, Some(DIVIDED), 150, 4),
    ] {
        let ((_folder, imported), target) = (stored(&of_size(name, hidden, within)), small());
        let validated = kernel(&imported.graph, &target);
        let proven = proven(&validated, &target, Form::Chunk, 256).unwrap();
        assert_eq!(parts_of_k(proven.plan()), parts, "{name}");
        let wide = |wave: &Wave| matches!(wave.action, Action::Attend { wide: true, .. });
        assert!(proven.plan().waves.iter().any(wide), "{name}: warpgroups attend");
        let shape = Shape::of(&validated.schedule().program).unwrap();
        // Pages in no order.
        let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
        let text = tokens(&imported, count);
        let (some, rest) = text.split_at(11);
        let launches = [(rows_of(0, 0, &given(some)), 1), (rows_of(0, 11, &given(rest)), 1)];
        let Some(Ran { cache, .. }) = run_kernel(&imported, &proven, &launches, &page_of) else {
            return skipped("a_generated_kernel_computes_keys_and_values_of_its_model", "C++ compiler", "`c++`");
        };
        let found = cached(validated.schedule(), &cache, &page_of, text.len());
        let error = worst_position(&expected(&imported, &text), &found);
        assert!(error < 0.03, "{name}: {error:e}");
    }
}

/// The same for steps: two texts are read at once, and decode together.
#[test]
fn a_generated_kernel_of_steps_decides_what_its_model_does() {
    const NAME: &str = "a_generated_kernel_of_steps_decides_what_its_model_does";
    let codes = |weights, embed| FormatPlan { embed: Some(named(embed)), ..all(named(weights)) };
    // With the number of waves of tiles.
    for (name, (cols, within), rows, plan, tiles) in [
        ("families/gemma3", (128, None), 16, FormatPlan::default(), 0),
        ("families/qwen3", (384, Some(576)), 32, codes("int4:32", "int8"), 4),
        ("families/starcoder2", (128, None), 64, FormatPlan::default(), 0),
        ("families/llama-gqa", (128, None), 64, codes("fp8", "mxfp4"), 0),
        ("families/qwen3", (HOLDING_COLS, None), 32, FormatPlan::default(), 0),
        ("families/qwen3", (TILES_COLS, Some(576)), 64, FormatPlan::default(), 2),
        ("families/gemma3", (640, Some(576)), 32, codes("int4:128", "int8"), 3),
    ] {
        let ((_folder, imported), target) = (stored(&of_size(name, cols, within)), small());
        let imported = rounded(imported, &plan);
        let validated = kernel(&imported.graph, &target);
        let proven = proven(&validated, &target, Form::Steps, rows).unwrap();
        let holds = proven.plan().waves.iter().any(|wave| wave.action.held() > 0);
        assert_eq!(holds, cols == HOLDING_COLS && plan == FormatPlan::default(), "{name}");
        assert_eq!(tile_waves(proven.plan()).len(), tiles, "{name}");
        let shape = Shape::of(&validated.schedule().program).unwrap();
        let blocks = shape.blocks();
        let pages: Vec<u32> = (0..2 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
        let texts = [tokens(&imported, 9), tokens(&imported, 13)[9..].to_vec()];
        let steps = 3;
        let launches = [
            ([rows_of(0, 0, &given(&texts[0])), rows_of(1, 0, &given(&texts[1]))].concat(), 1),
            ([rows_of(0, 9, &[Err(8)]), rows_of(1, 4, &[Err(12)])].concat(), steps),
        ];
        let Some(Ran { cache, tokens: told, .. }) = run_kernel(&imported, &proven, &launches, &pages) else {
            return skipped(NAME, "C++ compiler", "`c++`");
        };
        let (_values, weights) = values_of(&imported);
        let (first, then) = told.split_at(26);
        assert_eq!((then.len(), first[13 + 8], first[13 + 12]), (8, then[0], then[1]), "{name}");
        for (sequence, text) in texts.iter().enumerate() {
            let decided = then.iter().skip(sequence).step_by(2).map(|token| *token as u32);
            let all: Vec<u32> = text.iter().copied().chain(decided).collect();
            let mut session = Session::new(&imported.graph, &weights);
            for (at, &token) in all.iter().enumerate().take(all.len() - 1) {
                let logits = session.step(token);
                if at + 1 >= text.len() {
                    let most = logits.iter().copied().fold(f32::MIN, f32::max);
                    let least = logits.iter().copied().fold(f32::MAX, f32::min);
                    let of = logits[all[at + 1] as usize];
                    assert!(most - of < 0.03 * (most - least), "{name}: {of} of {least} to {most}");
                }
            }
            let known = text.len() + steps as usize;
            let of_sequence = &pages[sequence * blocks as usize..][..blocks as usize];
            let error = worst_position(
                &cached_by(&session, &imported.graph),
                &cached(validated.schedule(), &cache, of_sequence, known),
            );
            assert!(error < 0.03, "{name}: {error:e}");
        }
    }
}

/// The same for a chunk and its tail: the last rows of a chunk of two blocks decide, with pages in random order.
#[test]
fn a_generated_tail_decides_what_its_model_does() {
    const NAME: &str = "a_generated_tail_decides_what_its_model_does";
    let codes = |weights, embed| FormatPlan { embed: Some(named(embed)), ..all(named(weights)) };
    for (name, plan) in [
        ("families/gemma3", FormatPlan::default()),
        ("families/qwen3", codes("int4:32", "int8")),
        ("families/starcoder2", FormatPlan::default()),
        ("families/llama-gqa", FormatPlan::default()),
    ] {
        let ((_folder, imported), target) = (stored(&wide(name)), small());
        let imported = rounded(imported, &plan);
        let validated = kernel(&imported.graph, &target);
        let both = with_tail(&validated, &target, 256, 16).unwrap();
        let leaves_input = |wave: &Wave| matches!(wave.action, Action::MatMul { target: Written::Sums { .. }, .. });
        assert_eq!(both.chunk().plan().waves.iter().any(leaves_input), name == "families/llama-gqa", "{name}");
        let shape = Shape::of(&validated.schedule().program).unwrap();
        let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
        let text = tokens(&imported, 142);
        let (some, rest) = text.split_at(11);
        let launches = [(rows_of(0, 0, &given(some)), 1), (rows_of(0, 11, &given(rest)), 1)];
        let Some(chunk) = run_kernel(&imported, both.chunk(), &launches, &page_of) else {
            return skipped(NAME, "C++ compiler", "`c++`");
        };
        let (count, last) = (3, rest.len() as u32);
        let from: Vec<Result<u32, u32>> = (last - count..last).map(Err).collect();
        let rows = [(rows_of(0, text.len() as u32 - count, &from), 1)];
        // The tail makes the keys and values of its rows in the last layer again.
        let first = text.len() - count as usize;
        let mut before = Ran { cache: chunk.cache.clone(), ..chunk };
        spoil_last_layer(validated.schedule(), &mut before.cache, &page_of, first..text.len());
        let before = (&before, both.taken());
        let tail = run_kernel_after(&imported, both.tail(), &rows, &page_of, before).expect("a compiler, as before");
        let (_values, weights) = values_of(&imported);
        let mut session = Session::new(&imported.graph, &weights);
        let all: Vec<Vec<f32>> = text.iter().map(|&token| session.step(token)).collect();
        let vocab = imported.graph.vocab as usize;
        for (row, expected) in all[first..].iter().enumerate() {
            let found: Vec<f32> =
                tail.logits[row * vocab..][..vocab].iter().map(|bits| f32::from_bits(*bits)).collect();
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
            let error =
                norm(&mut expected.iter().zip(&found).map(|(e, f)| e - f)) / norm(&mut expected.iter().copied());
            assert!(error < 0.05, "{name}, row {row}: {error:e}");
            // The tokens of the only step, which are not there, and what it decided.
            let [begun, decided] = [0, count as usize].map(|at| tail.tokens[at + row]);
            assert_eq!((begun, decided), (-1, argmax(&found) as i32), "{name}, row {row}");
        }
        let error = worst_position(
            &cached_by(&session, &imported.graph),
            &cached(validated.schedule(), &tail.cache, &page_of, text.len()),
        );
        assert!(error < 0.03, "{name}: {error:e}");
    }
}

/// A row's logits, keys and values have the same bits alone and beside others, with any chunks of its prompt.
#[test]
fn a_generated_kernel_of_steps_gives_a_row_the_bits_that_it_has_alone() {
    const NAME: &str = "a_generated_kernel_of_steps_gives_a_row_the_bits_that_it_has_alone";
    // One text, which each sequence reads in other chunks. Then each sequence has a row at the next position, in a step with the given number of rows.
    // Where each row has a launch of its own, one chunk comes first: it saves launches.
    let cuts = [(1, 1), (7, 2), (16, 5), (64, 16), (33, 33)];
    let together = 32;
    for name in ["families/gemma3", "families/qwen3"] {
        let ((_folder, imported), mut target) = (stored(&wide(name)), small());
        target.spec.sm_count = 3;
        let validated = kernel(&imported.graph, &target);
        let proven = proven(&validated, &target, Form::Steps, 64).unwrap();
        let shape = Shape::of(&validated.schedule().program).unwrap();
        let blocks = shape.blocks();
        let pages: Vec<u32> = (0..8 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
        let text = tokens(&imported, 71);
        let (last, read) = text.split_last().unwrap();
        let mut launches = vec![];
        let mut reads = vec![];
        for (sequence, (cut, _)) in (0..).zip(cuts) {
            let (first, rest) = read.split_at(if cut == 1 { together } else { cut });
            let (mut at, before) = (0, launches.len());
            for tokens in std::iter::once(first).chain(rest.chunks(cut)) {
                launches.push((rows_of(sequence, at, &given(tokens)), 1));
                at += tokens.len() as u32;
            }
            reads.push(launches.len() - before);
        }
        // Rows of three other texts, the second one between the rows of which the first one is.
        let mut slots = vec![];
        let mut begins = [0; 3];
        for (sequence, (_, count)) in (0..).zip(cuts) {
            let mut rows = vec![];
            for (other, begin) in (0..).zip(&mut begins) {
                if other == 1 {
                    slots.push(rows.len());
                    rows.extend(rows_of(sequence, read.len() as u32, &given(&[*last])));
                }
                let more = (count - 1 + other) / 3;
                let of = tokens(&imported, 90)[20 + other + *begin..][..more].to_vec();
                rows.extend(rows_of(5 + other as u32, *begin as u32, &given(&of)));
                *begin += more;
            }
            assert_eq!(rows.len(), count);
            launches.push((rows, 1));
        }
        let Some(Ran { cache, logits, .. }) = run_kernel(&imported, &proven, &launches, &pages) else {
            return skipped(NAME, "C++ compiler", "`c++`");
        };
        let vocab = imported.graph.vocab as usize;
        let mut of_rows = logits.chunks_exact(vocab);
        let logits: Vec<Vec<&[u32]>> =
            launches.iter().map(|(rows, _)| of_rows.by_ref().take(rows.len()).collect()).collect();
        let decided = &logits[logits.len() - cuts.len()..];
        let of = |sequence: usize| {
            let of_sequence = &pages[sequence * blocks as usize..][..blocks as usize];
            cached(validated.schedule(), &cache, of_sequence, text.len())
        };
        let alone: Vec<&[u32]> = logits[..reads[0]].iter().flatten().copied().collect();
        assert_eq!(alone.len(), read.len());
        let mut at = 0;
        for (sequence, (cut, count)) in cuts.into_iter().enumerate() {
            assert!(
                of(sequence) == of(0),
                "{name}: the cache of a text in cuts of {cut}, and then of a row beside {count}"
            );
            assert!(decided[sequence][slots[sequence]] == decided[0][slots[0]], "{name}: a row of {count}");
            let found: Vec<&[u32]> = logits[at..at + reads[sequence]].iter().flatten().copied().collect();
            assert!(found == alone, "{name}: logits of a text in cuts of {cut}");
            at += reads[sequence];
        }
    }
}

/// The same where histories are cut: a row alone, beside a short one, and beside many.
#[test]
fn a_generated_kernel_in_splits_gives_a_row_the_bits_that_it_has_alone() {
    const NAME: &str = "a_generated_kernel_in_splits_gives_a_row_the_bits_that_it_has_alone";
    let ((_folder, imported), target) = (stored(&wide("families/qwen3")), small());
    let validated = kernel(&imported.graph, &target);
    let proven = proven_in_splits(&validated, &target, 64, 64);
    let shape = Shape::of(&validated.schedule().program).unwrap();
    let blocks = shape.blocks();
    let pages: Vec<u32> = (0..3 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
    let text = tokens(&imported, 150);
    let (read, last) = text.split_at(148);
    let mut launches: Vec<Launch> = vec![];
    // Three sequences read it in other cuts. Then each has two rows, of which the last one decides and goes on.
    for (sequence, cut) in [(0, 64), (1, 37), (2, 50)] {
        let chunks = (0..).step_by(cut).zip(read.chunks(cut));
        launches.extend(chunks.map(|(at, tokens)| (rows_of(sequence, at, &given(tokens)), 1)));
    }
    let ends = |sequence| rows_of(sequence, 148, &given(last));
    let alone = launches.len();
    launches.push((ends(0), 1));
    launches.push(([ends(1), rows_of(2, 0, &given(&text[..1]))].concat(), 1));
    // Positions that were there before, which get the same keys and values.
    let many = rows_of(0, 80, &given(&text[80..140]));
    launches.push(([ends(2), many].concat(), 1));
    let Some(Ran { logits, cache, .. }) = run_kernel(&imported, &proven, &launches, &pages) else {
        return skipped(NAME, "C++ compiler", "`c++`");
    };
    let vocab = imported.graph.vocab as usize;
    let mut of_rows = logits.chunks_exact(vocab);
    let logits: Vec<Vec<&[u32]>> =
        launches.iter().map(|(rows, _)| of_rows.by_ref().take(rows.len()).collect()).collect();
    for launch in [alone + 1, alone + 2] {
        assert!(logits[launch][..2] == logits[alone][..2], "{NAME}: launch {launch}");
    }
    let of = |sequence: usize| {
        let of_sequence = &pages[sequence * blocks as usize..][..blocks as usize];
        cached(validated.schedule(), &cache, of_sequence, text.len())
    };
    assert!(of(1)[1][0][140..] == of(0)[1][0][140..], "{NAME}: keys of the second layer");
    let error = worst_position(&expected(&imported, &text), &of(0));
    assert!(error < 0.03, "{error:e}");
}

/// Rows alone on the kernel for 32 rows, and cut elsewhere and beside others on that for 64: keys, values and tokens are the same.
#[test]
fn generated_kernels_in_one_order_give_rows_the_bits_that_they_have_alone() {
    rows_have_the_bits_that_they_have_alone(
        "generated_kernels_in_one_order_give_rows_the_bits_that_they_have_alone",
        &small(),
    );
}

/// The same on a target, in the memory of each of its devices.
pub fn rows_have_the_bits_that_they_have_alone(name: &str, target: &Target) {
    let (_folder, imported) = stored(&wide("families/qwen3"));
    let validated = kernel(&imported.graph, target);
    let plans = derive_alike(validated.schedule(), target, &[32, 64]).unwrap();
    let alike = prove_alike(plans, &validated, target).unwrap_or_else(|rules| panic!("{}", listed(&rules)));
    let shape = Shape::of(&validated.schedule().program).unwrap();
    let blocks = shape.blocks();
    let pages: Vec<u32> = (0..3 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
    let lengths = [6, 33, 70];
    let text = tokens(&imported, lengths.iter().sum());
    let texts = [&text[..6], &text[6..39], &text[39..]].map(<[u32]>::to_vec);
    let steps = 3;
    // One launch reads the first 32 tokens of the longest text. Each other token has a launch of its own. That of a text's last token has all steps.
    let alone = (0..3).flat_map(|n: u32| {
        let text = texts[n as usize].clone();
        let last = text.len() - 1;
        let first = if n == 2 { 32 } else { 1 };
        let launch = move |at: usize| {
            let begin = if at < first { 0 } else { at };
            let rows = rows_of(n, begin as u32, &given(&text[begin..=at]));
            (rows, if at == last { steps } else { 1 })
        };
        (first - 1..=last).map(launch).collect::<Vec<_>>()
    });
    // A chunk of each text in the order of `order`, until all but the last token of each is read; then all go on together.
    let together = |chunk: usize, most: usize, order: [usize; 3]| {
        let mut launches: Vec<Launch> = vec![];
        let mut read = [0; 3];
        while (0..3).any(|n| read[n] + 1 < texts[n].len()) {
            let mut rows = vec![];
            for n in order {
                let count = chunk.min(texts[n].len() - 1 - read[n]).min(most - rows.len());
                rows.extend(rows_of(n as u32, read[n] as u32, &given(&texts[n][read[n]..read[n] + count])));
                read[n] += count;
            }
            launches.push((rows, 1));
        }
        let last = |n: usize| rows_of(n as u32, read[n] as u32, &given(&texts[n][read[n]..]));
        launches.push((order.into_iter().flat_map(last).collect(), steps));
        launches
    };
    // As bits: a device leaves the heads of another one as they were, which are no numbers.
    let of = |bytes: &[u8]| -> Vec<u64> {
        let of_text = |n: usize| {
            let pages = &pages[n * blocks as usize..][..blocks as usize];
            cached(validated.schedule(), bytes, pages, texts[n].len() + steps as usize - 1)
        };
        (0..3).flat_map(of_text).flatten().flatten().flatten().map(f64::to_bits).collect()
    };
    let alone: Vec<Launch> = alone.collect();
    let Some(Ran { cache, others, tokens: told, .. }) = run_kernel(&imported, &alike.plans()[0], &alone, &pages) else {
        return skipped(name, "C++ compiler", "`c++`");
    };
    let of_each = |cache: &[u8], others: &[Vec<u8>]| -> Vec<_> {
        [of(cache)].into_iter().chain(others.iter().map(|cache| of(cache))).collect()
    };
    let expected = of_each(&cache, &others);
    assert_eq!(expected.len() as u32, target.devices);
    assert!((0..expected[0].len()).all(|at| expected.iter().any(|of| !f64::from_bits(of[at]).is_nan())));
    // From the last launch of each text: its token, and the decided one.
    let mut at = 0;
    let decided: Vec<&[i32]> = alone
        .iter()
        .filter_map(|(rows, steps)| {
            let told = &told[at..][..rows.len() * (*steps as usize + 1)];
            at += told.len();
            (*steps > 1).then_some(told)
        })
        .collect();
    for (plan, chunk, order) in [(1, 64, [0, 1, 2]), (1, 7, [2, 0, 1]), (0, 16, [1, 2, 0])] {
        let proven = &alike.plans()[plan];
        let launches = together(chunk, proven.plan().rows as usize, order);
        let ran = run_kernel(&imported, proven, &launches, &pages).expect("a compiler, it was there before");
        let Ran { cache, others, tokens: told, .. } = ran;
        let what = format!("chunks of {chunk} on the kernel for {} rows", proven.plan().rows);
        assert!(of_each(&cache, &others) == expected, "{what}: keys or values");
        let last = &told[told.len() - 3 * (steps as usize + 1)..];
        for (row, n) in order.into_iter().enumerate() {
            let found: Vec<i32> = last.iter().skip(row).step_by(3).copied().collect();
            assert_eq!(found, decided[n], "{what}: text {n}");
        }
    }
}
