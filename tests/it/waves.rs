//! Plans of waves: which models have one, that a wrong one has no proof, and that a proven one computes its model.

use std::fs;
use std::path::Path;
use std::process::Command;

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::Trace;
use monobloc::codegen::waves::{emit, encode};
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::format::{Code, Format, NAMED, ScaleCode};
use monobloc::ir::op::{Attention, Op, Role};
use monobloc::ir::program::{Grid, Space};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::variant::swizzled_piece;
use monobloc::ir::{BufferId, GridId};
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::model::graph::{ModelGraph, QkNormSpan, TensorId};
use monobloc::model::weights::Weights;
use monobloc::pack::pack;
use monobloc::random::Random;
use monobloc::rows::Shape;
use monobloc::target::Target;
use monobloc::validate::{Validated, validate};
use monobloc::waves::{
    Action, DivisionId, Input, Layout, NormOf, Over, Plan, Proven, Refused, Share, Sum, Target as Written, Violation,
    Wave, WorkId, derive, prove,
};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::formats::{all, named, rounded};
use crate::nvrtc::nvrtc;
use crate::proof_support::{BF16, FP32, TOY, Toy};
use crate::skipped;
use crate::support::{checkpoints, fixture};
use crate::waves_executor::{Rows, TOLERANCE, difference, execute, expected};

fn h200() -> Target {
    Target::builtin("h200").unwrap()
}

/// The kernel for 8 rows whose pack and pages a kernel of waves shares.
fn kernel(graph: &ModelGraph, target: &Target) -> Validated {
    kernel_in(graph, target, BF16)
}

fn kernel_in(graph: &ModelGraph, target: &Target, precision: Precision) -> Validated {
    let base = Candidate::default_for(graph, target, precision);
    let room = Room { rows: 8, sequences: 8, positions: 4096 };
    let placed = place_rows(graph, "waves", precision, graph.positions_max.min(512), target, &base, room);
    let placed = placed.unwrap_or_else(|reason| panic!("{} on {}: {reason}", graph.family, target.name));
    validate(placed, target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// The config of a fixture with heads that tensor cores take, and random weights.
fn wide(name: &str) -> Imported {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let own = config["head_dim"].is_u64();
    let (heads, kv) = if own { (6, 2) } else { (2, 1) };
    for (key, value) in [
        ("hidden_size", 128),
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

/// The same with its weights in a file, which is read more often than random weights can be made.
fn stored(imported: &Imported) -> (tempfile::TempDir, Imported) {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |id: usize| -> Vec<u8> {
        let id = TensorId::from(id);
        let mut row = vec![0.0f32; imported.weights.cols(id)];
        let mut bytes = vec![];
        for r in 0..imported.weights.rows(id) {
            imported.weights.read_row_f32(id, r, &mut row);
            bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        bytes
    };
    let tensors: Vec<_> = imported.graph.tensors.iter().enumerate().map(|(id, t)| (t, bytes(id))).collect();
    let views = tensors.iter().map(|(tensor, bytes)| {
        let shape = tensor.shape.iter().map(|n| *n as usize).collect();
        (tensor.name.clone(), TensorView::new(Dtype::F32, shape, bytes).unwrap())
    });
    fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    fs::write(folder.path().join("config.json"), &imported.config_text).unwrap();
    let imported = import(folder.path()).unwrap_or_else(|error| panic!("{error}"));
    (folder, imported)
}

/// An H200 of few SMs, so that a share is more than one unit.
fn small() -> Target {
    let mut target = h200();
    target.spec.sm_count = 12;
    target
}

/// A plan that was derived, and its proof.
fn proven<'a>(validated: &'a Validated, target: &Target, rows: u32) -> Result<Proven<'a>, Refused> {
    let plan = derive(validated.schedule(), target, rows)?;
    Ok(prove(plan, validated, target).unwrap_or_else(|violations| panic!("{}", listed(&violations))))
}

fn listed(violations: &[Violation]) -> String {
    violations.iter().map(|violation| format!("{violation}\n")).collect()
}

/// What of a plan can be told in a line, or why there is none.
fn decided(graph: &ModelGraph) -> String {
    let target = h200();
    let validated = kernel(graph, &target);
    match proven(&validated, &target, 512) {
        Err(refused) => refused.to_string(),
        Ok(proven) => {
            let machine = &proven.plan().machine;
            format!("{} waves, {} slots of {} bytes", proven.plan().waves.len(), machine.slots, machine.slot_bytes)
        }
    }
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

/// A model that silently loses its kernel, or gains one, changes this file; `BLESS=1` writes it anew.
#[test]
fn models_have_the_plans_that_they_had() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = String::new();
    let configs = fs::read_dir(root.join("manifests/configs")).unwrap();
    let mut configs: Vec<_> = configs.map(|file| file.unwrap().path()).collect();
    configs.sort();
    for path in configs {
        let imported = import_config_only(&fs::read_to_string(&path).unwrap(), 0).unwrap();
        found += &format!("{}: {}\n", path.file_stem().unwrap().display(), decided(&imported.graph));
    }
    for name in [vec!["tinystories-llama".to_string()], checkpoints("families"), checkpoints("variants")].concat() {
        found += &format!("{name}: {}\n", decided(&import(&fixture(&name)).unwrap().graph));
    }
    let variants = ["cohere", "cohere-qk-norm", "cohere2", "gemma", "gemma-bias", "gemma2-softcap", "gemma3-v4"];
    let more =
        ["gpt-neox-sequential", "granite-bias", "llama-one-position", "ministral", "olmo2-bias", "qwen3-bias-swa"];
    let last = ["smollm3-window", "stablelm-parallel", "starcoder2-window"];
    let variants = variants.iter().chain(&more).chain(&last).map(|name| format!("variants/{name}"));
    for name in checkpoints("families").into_iter().chain(variants) {
        found += &format!("{name} with heads of 64: {}\n", decided(&wide(&name).graph));
    }
    blessed("waves_models.txt", &found);
}

/// The text of a plan of the smallest of them, in which every kind of wave is.
#[test]
fn the_text_of_a_plan_is_what_it_was() {
    let (imported, target) = (wide("families/gemma3"), h200());
    let validated = kernel(&imported.graph, &target);
    blessed("waves_plan.txt", &proven(&validated, &target, 512).unwrap().plan().to_string());
}

/// Each block finds its own shares, for every number of blocks of rows, as `Shares` of waves/context.cuh looks for them.
#[test]
fn tables_hold_the_shares_of_a_plan() {
    let (imported, target) = (wide("families/gemma3"), small());
    let validated = kernel(&imported.graph, &target);
    let proven = proven(&validated, &target, 512).unwrap();
    let (plan, tables) = (proven.plan(), encode(&proven));
    let (divisions, sms) = (plan.divisions.len(), plan.machine.sms as usize);
    assert_eq!(tables.share_index.len(), 4 * divisions * sms + 1);
    for (d, division) in plan.divisions.iter().enumerate() {
        for (blocks, of_sms) in division.shares.iter().enumerate() {
            for (sm, shares) in of_sms.iter().enumerate() {
                let at = (blocks * divisions + d) * sms + sm;
                let range = tables.share_index[at] as usize..tables.share_index[at + 1] as usize;
                let found = tables.shares[range].iter().map(|s| Share { row: s.row, rows: s.rows, lo: s.lo, hi: s.hi });
                assert_eq!(found.collect::<Vec<_>>(), *shares);
            }
        }
    }
    for (wave, entry) in plan.waves.iter().zip(&tables.waves) {
        assert_eq!((wave.grid.0, wave.division.0), (entry.grid, entry.division));
    }
}

/// Both norms, heads of their own norm and windows; biases, LayerNorm and plain activations; with and without time stamps.
#[test]
fn kernels_of_waves_compile() {
    let Some(nvrtc) = nvrtc("kernels_of_waves_compile") else { return };
    for (name, record, trace) in [("families/gemma3", "h200", Trace::On), ("families/starcoder2", "b200", Trace::Off)] {
        let target = Target::builtin(record).unwrap();
        let validated = kernel(&wide(name).graph, &target);
        let source = emit(&proven(&validated, &target, 512).unwrap(), &target, trace);
        let compiled = nvrtc.compile(&source).unwrap_or_else(|error| panic!("{name} on {record}: {error}"));
        assert!(!compiled.log.contains("warning"), "{name} on {record}: {}", compiled.log);
    }
}

/// Scales of groups, of groups with zero points, and of rows.
#[test]
fn kernels_of_waves_of_codes_compile() {
    let Some(nvrtc) = nvrtc("kernels_of_waves_of_codes_compile") else { return };
    let zeros = Format::by_group(Code::Int4, 128, ScaleCode::F16, true);
    for (format, record) in
        [(named("int4:32"), "h200"), (zeros, "h100"), (named("fp8"), "h200"), (named("mxfp4"), "b200")]
    {
        let target = Target::builtin(record).unwrap();
        let coded = rounded(wide("families/llama-gqa"), &all(format));
        let validated = kernel(&coded.graph, &target);
        let source = emit(&proven(&validated, &target, 512).unwrap(), &target, Trace::Off);
        let compiled = nvrtc.compile(&source).unwrap_or_else(|error| panic!("{format} on {record}: {error}"));
        assert!(!compiled.log.contains("warning"), "{format} on {record}: {}", compiled.log);
    }
}

#[test]
fn targets_that_cannot_are_refused_by_name() {
    let graph = wide("families/llama-gqa").graph;
    // A plan is derived from any schedule: that of an H200 does.
    let validated = kernel(&graph, &h200());
    let plan = derive(validated.schedule(), &h200(), 512).unwrap();
    let mut can = vec![];
    for name in Target::builtin_names() {
        let target = Target::builtin(name).unwrap();
        match derive(validated.schedule(), &target, 512) {
            Err(Refused::Target { target, .. }) => assert_eq!(target, name),
            Err(Refused::SharedMemory { target, .. }) => assert_eq!(target, name),
            Err(other) => panic!("{name}: {other}"),
            Ok(_) => can.push(name),
        }
        // The same record with the name that the plan has.
        let capable = can.last() == Some(&name);
        let renamed = Target { name: plan.machine.target.clone(), ..target };
        let rules = prove(plan.clone(), &validated, &renamed).err().unwrap_or_default();
        assert!(capable || rules.iter().any(|violation| violation.rule == "machine"), "{name}: {rules:?}");
    }
    assert_eq!(can, ["h100", "h200", "b200"]);
    for name in ["a100", "t4", "l4", "cpu"] {
        let refused = derive(validated.schedule(), &Target::builtin(name).unwrap(), 512).unwrap_err().to_string();
        assert_eq!(refused, format!("target `{name}` has no bulk copies or no tensor cores"));
    }
}

/// Weights that tensor cores do not take as they are.
#[test]
fn every_format_of_codes_has_a_plan_and_fp32_has_none() {
    let refused = derive(kernel_in(&wide("families/llama-gqa").graph, &h200(), FP32).schedule(), &h200(), 512);
    assert_eq!(refused.unwrap_err().to_string(), "weights of `qkv.0`: expected bf16, or codes");
    let formats: Vec<_> = NAMED.into_iter().filter(|(_, format)| !format.is_plain()).collect();
    assert!(formats.len() > 4);
    for (name, format) in formats {
        let coded = rounded(wide("families/llama-gqa"), &all(format));
        let validated = kernel(&coded.graph, &h200());
        let proven = proven(&validated, &h200(), 512).unwrap_or_else(|refused| panic!("{name}: {refused}"));
        // Sums of groups take registers of their own: passes are shorter, and one of as many units as plain weights have is refused.
        let mut plan = proven.plan().clone();
        for wave in &mut plan.waves {
            if let Action::MatMul { pass, .. } = &mut wave.action {
                *pass = 17;
            }
        }
        plan.machine.slot_bytes = 64 << 10;
        plan.machine.slots = 3;
        let judged = prove(plan, &validated, &h200());
        assert_eq!(judged.is_err(), format.groups.is_some(), "{name}");
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
        match proven(&validated, &target, one_of(&[1, 128, 300, 512, 1000])) {
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
                    let found = execute(program, &imported, proven.plan(), &[&text[..7], &text[7..]], at);
                    let difference = difference(&expected(&imported, &text), &found);
                    assert!(difference < TOLERANCE, "{toy:?}: {difference:e}");
                }
            }
            Err(refused) => refusals.push(refused.to_string()),
        }
    }
    refusals.sort();
    refusals.dedup();
    let known = [
        "attention of `attn.0`: expected heads that tensor cores take whole",
        "the output of `up.0`: expected an even number of columns",
        "the output of `gate_up.0`: expected an even number of columns",
        "the sum of `o.0`: expected one that is published",
        "the width of `embed`: expected whole pieces of 8 values",
    ];
    for refused in &refusals {
        assert!(known.contains(&refused.as_str()), "{refused}");
    }
    assert!(plans > 200 && executed > 20, "{plans} plans, {executed} executed, else {refusals:#?}");
}

// ---- mutants ----------------------------------------------------------------------------------------------------------

/// A wrong plan: what is wrong, the rule that must say so where one is obvious, and the plan.
struct Mutant {
    name: String,
    rule: Option<&'static str>,
    plan: Plan,
}

struct Mutants<'a> {
    of: &'a Plan,
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
            (m.slots, m.slot_bytes, m.state_bytes) = (u32::MAX, u32::MAX, u32::MAX);
        });
        self.add("an SM less", Some("partition"), |p| p.machine.sms -= 1);
        for n in [0, 4, 9, 16, u32::MAX] {
            self.add(format!("{n} warps"), wrong, |p| p.machine.warps = n);
            self.add(format!("{n} loader warps"), wrong, |p| p.machine.loader_warps = n + u32::from(n == 4));
        }
        // Of 168 that each thread has at the launch.
        for (consumers, loaders) in [(216, 80), (224, 72), (220, 72), (160, 72), (0, 72), (u32::MAX, 72), (216, 176)] {
            self.add(format!("{consumers} and {loaders} registers"), wrong, |p| {
                (p.machine.registers, p.machine.loader_registers) = (consumers, loaders);
            });
        }
        for n in [0, 16, 70, u32::MAX] {
            self.add(format!("{n} registers of loaders"), wrong, |p| p.machine.loader_registers = n);
        }
        for n in [0, 1, 64, u32::MAX] {
            self.add(format!("{n} slots"), wrong, |p| p.machine.slots = n);
        }
        for n in [u32::MAX, self.of.machine.slot_bytes + 64, self.of.machine.slot_bytes * 4] {
            self.add(format!("slots of {n} bytes"), wrong, |p| p.machine.slot_bytes = n);
        }
        self.add("half slots", None, |p| p.machine.slot_bytes /= 2);
        self.add("slots of no bytes", None, |p| p.machine.slot_bytes = 0);
        for n in [0, 256, u32::MAX] {
            self.add(format!("{n} bytes of state"), wrong, |p| p.machine.state_bytes = n);
        }
        for n in [0, 1, self.of.rows - 1, self.of.rows + 64] {
            self.add(format!("{n} rows"), wrong, |p| p.rows = n);
        }
        self.add("a block of rows more", Some("partition"), |p| p.rows += 128);
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
            for cols in [0, 1, work[i].cols - 2, work[i].cols + 1, work[i].cols * 2, u32::MAX] {
                self.add(format!("a{i} of {cols} columns"), None, |p| p.work[i].cols = cols);
            }
            let rows = [DType::F32, DType::Bf16, DType::F16, DType::I32].map(Layout::Rows);
            for layout in rows.into_iter().chain([Layout::Operand]) {
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
                self.add(format!("w{w} divided as d{d}"), wrong, |p| p.waves[w].division = DivisionId(d));
            }
            self.add(format!("w{w} divided as none"), Some("bounds"), |p| p.waves[w].division = DivisionId(99));
        }
        let last = waves.last().expect("waves").clone();
        let Action::Append { queries, .. } = last.action else { panic!("the last wave appends") };
        let attend = waves.iter().find(|wave| matches!(wave.action, Action::Attend { .. }));
        if let Some(Wave { action: Action::Attend { out, tile, .. }, division, .. }) = attend.cloned() {
            let action = Action::Attend { queries, out, tile };
            self.add("attention of the last layer", wrong, |p| p.waves.push(Wave { action, division, ..last }));
        }
        self.add("no waves", wrong, |p| p.waves.clear());
    }

    /// Every buffer that a wave names is another one.
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
                Action::MatMul { x, target, pass } => {
                    for pass in [0, 29, 4096, u32::MAX - 3] {
                        let action = Action::MatMul { x, target, pass };
                        self.add(format!("w{w} in passes of {pass}"), Some("ring"), |p| p.waves[w].action = action);
                    }
                    let (Written::Out(id) | Written::Residual(id)) = target;
                    let other = match target {
                        Written::Out(_) => Written::Residual(id),
                        Written::Residual(_) => Written::Out(id),
                    };
                    let action = Action::MatMul { x, target: other, pass };
                    self.add(format!("w{w} writes another way"), wrong, |p| p.waves[w].action = action);
                    let action = Action::MatMul { x, target: Written::Out(x), pass };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::Append { x, queries: _ } => {
                    let action = Action::Append { x, queries: x };
                    self.add(format!("w{w} in place"), Some("in-place"), |p| p.waves[w].action = action);
                }
                Action::Attend { queries, out, .. } => {
                    for tile in [0, 8, 24, 48, 1024, u32::MAX - 15] {
                        let action = Action::Attend { queries, out, tile };
                        self.add(format!("w{w} in tiles of {tile}"), wrong, |p| p.waves[w].action = action);
                    }
                }
            }
        }
    }

    fn rows_attributes(&mut self, w: usize, residual: WorkId, sum: Option<Sum>, out: Option<Input>) {
        let wrong = Some("order");
        let mut with = |name: &str, rule, sum, out| {
            self.add(format!("w{w}: {name}"), rule, |p| p.waves[w].action = Action::Rows { residual, sum, out });
        };
        match sum {
            Some(Sum::Embed { table, scale }) => {
                with("another scale", wrong, Some(Sum::Embed { table, scale: scale * 1.01 }), out);
                with("no scale", wrong, Some(Sum::Embed { table, scale: f32::NAN }), out);
                for table in [table.0 + 1, u32::MAX] {
                    with("another table", wrong, Some(Sum::Embed { table: BufferId(table), scale }), out);
                }
            }
            Some(Sum::Branch { branch, norm, scale }) => {
                with("another scale", wrong, Some(Sum::Branch { branch, norm, scale: -scale }), out);
                for norm in other_norms(norm) {
                    with("another norm of the branch", wrong, Some(Sum::Branch { branch, norm, scale }), out);
                }
            }
            None => {}
        }
        with("no sum", wrong, None, out);
        match out {
            Some(Input { to, norm }) => {
                with("no input", wrong, sum, None);
                let twice = sum.map(|_| "in-place");
                with("the input over the residual", twice, sum, Some(Input { to: residual, norm }));
                for other in norm.into_iter().flat_map(other_norms).map(Some).chain([None]) {
                    with("another norm", wrong, sum, Some(Input { to, norm: other }));
                }
            }
            // A product overwrites it before anything reads it, but its norm may name anything.
            None => {
                let inputs = self.of.waves.iter().filter_map(|wave| match wave.action {
                    Action::Rows { out, .. } => out,
                    _ => None,
                });
                let norms: Vec<_> = inputs.filter_map(|out| Some((out.to, out.norm?))).collect();
                for (to, norm) in
                    norms.into_iter().take(2).flat_map(|(to, norm)| other_norms(norm).into_iter().map(move |n| (to, n)))
                {
                    let action = Action::Rows { residual, sum, out: Some(Input { to, norm: Some(norm) }) };
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
                Over::Rows => vec![],
                Over::Units { n } => [0, n - 1, n + 1, u32::MAX >> 8].map(|n| Over::Units { n }).to_vec(),
                Over::Heads { n, rows } => {
                    let some = [(0, rows), (n - 1, rows), (n + 1, rows), (n, 0), (n, rows / 2), (n, 3), (n, u32::MAX)];
                    some.map(|(n, rows)| Over::Heads { n, rows }).to_vec()
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

/// What becomes of a share.
type Change = (&'static str, fn(&mut Share));

/// The buffers that an action names.
fn works(action: &mut Action) -> Vec<&mut WorkId> {
    match action {
        Action::Rows { residual, sum, out } => {
            let branch = match sum {
                Some(Sum::Branch { branch, .. }) => Some(branch),
                _ => None,
            };
            [residual].into_iter().chain(branch).chain(out.as_mut().map(|out| &mut out.to)).collect()
        }
        Action::MatMul { x, target: Written::Out(id) | Written::Residual(id), .. } => vec![x, id],
        Action::Append { x, queries } => vec![x, queries],
        Action::Attend { queries, out, .. } => vec![queries, out],
    }
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

/// Every mutant either has no proof, or computes the same: two judges for one question.
#[test]
fn a_wrong_plan_has_no_proof() {
    let target = small();
    let mut count = 0;
    for name in ["families/gemma3", "families/starcoder2", "families/qwen3"] {
        let imported = wide(name);
        let validated = kernel(&imported.graph, &target);
        let program = &validated.schedule().program;
        let of = proven(&validated, &target, 256).unwrap().plan().clone();
        let mut mutants = Mutants { of: &of, made: vec![] };
        mutants.machine(target.spec.sm_count);
        mutants.arena();
        mutants.order();
        mutants.operands();
        mutants.attributes();
        mutants.divisions();
        let text = tokens(&imported, 140);
        let keys_and_values = expected(&imported, &text);
        count += mutants.made.len();
        for Mutant { name: what, rule, plan } in mutants.made {
            match prove(plan.clone(), &validated, &target) {
                Err(violations) => {
                    let named = rule.is_none_or(|rule| violations.iter().any(|violation| violation.rule == rule));
                    assert!(named, "{name}, {what}: expected `{}`, found\n{}", rule.unwrap(), listed(&violations));
                }
                Ok(_) => {
                    assert_eq!(rule, None, "{name}, {what}: proven");
                    let found = execute(program, &imported, &plan, &[&text], 1);
                    let difference = difference(&keys_and_values, &found);
                    assert!(difference < TOLERANCE, "{name}, {what}: proven, and differs by {difference:e}");
                }
            }
        }
    }
    assert!(count > 3000, "{count} mutants");
}

// ---- the second judge -------------------------------------------------------------------------------------------------

fn tokens(imported: &Imported, count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * i * 7 + i * 13 + 5) % imported.graph.vocab).collect()
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
            let Ok(proven) = proven(&validated, &target, 512) else { continue };
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

/// The executor sees what a plan leaves out, does too early, or does twice.
#[test]
fn a_wrong_plan_computes_something_else() {
    let ((_folder, imported), target) = (stored(&wide("families/gemma3")), small());
    let validated = kernel(&imported.graph, &target);
    let program = &validated.schedule().program;
    let of = proven(&validated, &target, 256).unwrap().plan().clone();
    let text = tokens(&imported, 140);
    let keys_and_values = expected(&imported, &text);
    let differs = |plan: &Plan| difference(&keys_and_values, &execute(program, &imported, plan, &[&text], 5));
    assert!(differs(&of) < TOLERANCE);
    let mut mutants = Mutants { of: &of, made: vec![] };
    for w in 0..of.waves.len() {
        mutants.add(format!("w{w} dropped"), None, |p| {
            p.waves.remove(w);
        });
        if w + 1 < of.waves.len() {
            mutants.add(format!("w{w} after the next"), None, |p| p.waves.swap(w, w + 1));
        }
    }
    for d in 0..of.divisions.len() {
        // One that has rows of the text.
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

/// Runs the generated kernel for this CPU over `chunks`. Returns the bytes of the cache, or `None` without a compiler. `page_of` has the
/// page of each block of positions.
fn run_kernel(imported: &Imported, proven: &Proven<'_>, chunks: &[&[u32]], page_of: &[u32]) -> Option<Vec<u8>> {
    let (schedule, tables) = (proven.validated().schedule(), encode(proven));
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    let text = emit(proven, &small(), Trace::Off).text;
    let (text, _) = text.split_once("extern \"C\"").expect("an entry point");
    put("generated.cuh", text.replace("#include \"monobloc_waves.cuh\"", "").as_bytes());
    put("waves", bytemuck::cast_slice(&tables.waves));
    put("shares", bytemuck::cast_slice(&tables.shares));
    put("share_index", bytemuck::cast_slice(&tables.share_index));
    put("pages", bytemuck::cast_slice(page_of));
    put("tokens", bytemuck::cast_slice(&chunks.concat()));
    put("pack", &pack(schedule, &imported.graph, &imported.weights).unwrap());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-I"]).arg(root.join("kernels"));
    compiler.arg("-I").arg(folder.path()).arg(root.join("tests/it/waves_kernel.cc"));
    let output = compiler.arg("-o").arg(folder.path().join("program")).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut program = Command::new(folder.path().join("program"));
    program.arg(proven.plan().work_bytes().to_string()).arg(schedule.arena_bytes(Space::Cache).to_string());
    program.args(chunks.iter().map(|chunk| chunk.len().to_string()));
    let output = program.current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Some(fs::read(folder.path().join("cache")).unwrap())
}

/// Keys and values of each layer and position, out of the bytes of the cache.
fn cached(schedule: &Schedule, bytes: &[u8], page_of: &[u32], positions: usize) -> Vec<[Rows; 2]> {
    let shape = Shape::of(&schedule.program).unwrap();
    let (page_rows, pool_rows) = (shape.page_rows as usize, (shape.page_rows * shape.pages) as usize);
    let of = |grid: &Grid, a: &Attention, role: Role| -> Rows {
        let place = schedule.placement[grid.operand(role).unwrap().buffer.index()].unwrap() as usize;
        let (heads, dim) = (a.kv_heads() as usize, a.head_dim as usize);
        let value = |position: usize, head: usize, d: usize| {
            let row = head * pool_rows + page_of[position / page_rows] as usize * page_rows + position % page_rows;
            let piece = swizzled_piece(position as u32, d as u32 / 8) as usize;
            let at = place + row * dim * 2 + piece * 16 + d % 8 * 2;
            f64::from(f32::from_bits(u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]])) << 16))
        };
        let row = |position| (0..heads * dim).map(|i| value(position, i / dim, i % dim)).collect();
        (0..positions).map(row).collect()
    };
    let layers = schedule.program.grids.iter().filter_map(|grid| match &grid.op {
        Op::Attention(a) => Some([of(grid, a, Role::AppendK), of(grid, a, Role::AppendV)]),
        _ => None,
    });
    layers.collect()
}

/// The largest difference of keys or values of a position by their norm, as a device is judged.
fn worst_position(expected: &[[Rows; 2]], found: &[[Rows; 2]]) -> f64 {
    let mut most = 0.0f64;
    for (expected, found) in expected.iter().flatten().flatten().zip(found.iter().flatten().flatten()) {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let error = norm(&mut expected.iter().zip(found).map(|(e, f)| e - f)) / norm(&mut expected.iter().copied());
        most = if error.is_nan() { f64::INFINITY } else { most.max(error) };
    }
    most
}

/// The generated text, its tables and the pack, run block by block: heads with norms, norms after branches and windows; LayerNorm, biases
/// and plain activations. bf16 rounds each activation to 2^-9 of itself.
#[test]
fn a_generated_kernel_computes_keys_and_values_of_its_model() {
    for (name, count) in [("families/gemma3", 140), ("families/starcoder2", 30)] {
        let ((_folder, imported), target) = (stored(&wide(name)), small());
        let validated = kernel(&imported.graph, &target);
        let proven = proven(&validated, &target, 256).unwrap();
        let shape = Shape::of(&validated.schedule().program).unwrap();
        // Pages in no order.
        let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
        let text = tokens(&imported, count);
        let (some, rest) = text.split_at(11);
        let Some(bytes) = run_kernel(&imported, &proven, &[some, rest], &page_of) else {
            return skipped("a_generated_kernel_computes_keys_and_values_of_its_model", "C++ compiler", "`c++`");
        };
        let found = cached(validated.schedule(), &bytes, &page_of, text.len());
        let error = worst_position(&expected(&imported, &text), &found);
        assert!(error < 0.03, "{name}: {error:e}");
    }
}
