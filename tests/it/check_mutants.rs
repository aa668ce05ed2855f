//! Tests the check on trained weights: a right interpreter passes at every kind of position, and one with a fault of a kernel or of a pack is refused.
//!
//! The fault is in what is checked: another graph, another checkpoint or another pack than those of the reference. `MONOBLOC_TRAINED` names folders of
//! more checkpoints, separated by colons. `--nocapture` shows how much of its tolerance each of them takes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::check::{CheckError, Expected, Figures, Subject, check_cpu, compare_cpu, expect_cpu};
use monobloc::dtype::{DType, Precision};
use monobloc::format::FormatPlan;
use monobloc::interp::{Interp, Options};
use monobloc::ir::schedule::Schedule;
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import};
use monobloc::model::graph::ModelGraph;
use monobloc::pack::pack;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Validated, validate};
use safetensors::SafeTensors;

use crate::formats::{named, rounded};
use crate::support::fixture;

const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
const CACHE_FP8: Precision = Precision { cache: DType::E4m3, ..BF16 };

/// Prompted positions, and deep ones whose cache is made up.
const POSITIONS: [u32; 5] = [0, 1, 31, 1000, 1900];
const CONTEXT_MAX: u32 = 2048;

/// How weights and activations are stored.
type Stored = (&'static str, Precision, Option<&'static str>);
const FORMATS: [Stored; 5] = [
    ("fp32", FP32, None),
    ("bf16", BF16, None),
    ("int8", BF16, Some("int8")),
    ("fp8", BF16, Some("fp8")),
    ("int4:32", BF16, Some("int4:32")),
];

fn read(folder: &Path, format: Option<&str>) -> Imported {
    let imported = import(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    match format {
        Some(name) => rounded(imported, &FormatPlan { weights: Some(named(name)), ..FormatPlan::default() }),
        None => imported,
    }
}

fn place(graph: &ModelGraph, target: &Target, precision: Precision) -> Validated {
    let context_max = CONTEXT_MAX.min(graph.positions_max);
    let default = Candidate::default_for(graph, target, precision).for_context(context_max);
    let program = lower(graph, "test", precision, context_max, &default).unwrap();
    validate(schedule(program, target, &default).unwrap(), target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// Changes a graph.
type Change = fn(&mut ModelGraph);

/// What is wrong.
enum Fault {
    Graph(Change),
    /// The values of a tensor, with bytes of a value and values of a row.
    Weights(&'static str, fn(&mut [u8], usize)),
    /// The table of angles, by position.
    Angles(fn(&mut [u8], usize)),
}

const HEAD_SWAP: &str = "model.layers.1.self_attn.q_proj.weight";

fn faults() -> Vec<(&'static str, Fault)> {
    vec![
        (
            "the norm of another layer",
            Fault::Graph(|graph| {
                graph.layers[1].mlp_norm = graph.layers[2].mlp_norm.clone();
            }),
        ),
        (
            "the attention norm of the first layer in the last",
            Fault::Graph(|graph| {
                let first = graph.layers[0].attn_norm.clone();
                graph.layers.last_mut().unwrap().attn_norm = first;
            }),
        ),
        ("a layer left out", Fault::Graph(|graph| graph.layers[2].residual_scale = 0.0)),
        (
            "scale of attention in one layer",
            Fault::Graph(|graph| graph.layers[1].attention_mut().unwrap().scale *= 1.5),
        ),
        (
            "scale of attention in all layers",
            Fault::Graph(|graph| {
                graph.layers.iter_mut().for_each(|layer| layer.attention_mut().unwrap().scale *= 1.1);
            }),
        ),
        (
            "keys and values of a layer in each other's places",
            Fault::Graph(|graph| {
                let attn = graph.layers[1].attention_mut().unwrap();
                std::mem::swap(&mut attn.k, &mut attn.v);
            }),
        ),
        (
            "a window that the model has not",
            Fault::Graph(|graph| {
                graph.layers.iter_mut().for_each(|layer| layer.attention_mut().unwrap().window = Some(16));
            }),
        ),
        ("rotary frequencies of the next pair", Fault::Graph(|graph| graph.ropes[0].inv_freq.rotate_left(1))),
        (
            "two query heads swapped",
            Fault::Weights(HEAD_SWAP, |bytes, row| {
                // Heads of 32 or 64 rows: the rows of at least one of them are others.
                let (a, b) = bytes.split_at_mut(32 * row);
                a.swap_with_slice(&mut b[96 * row..128 * row]);
            }),
        ),
        (
            "the attention of a layer adds nothing",
            Fault::Weights("model.layers.2.self_attn.o_proj.weight", |bytes, _| {
                bytes.fill(0);
            }),
        ),
        (
            "a row of a matrix with the other sign",
            Fault::Weights("model.layers.1.mlp.down_proj.weight", |bytes, row| {
                bytes[7 * row..8 * row].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
            }),
        ),
        (
            "two rows of values swapped",
            Fault::Weights("model.layers.0.self_attn.v_proj.weight", |bytes, row| {
                let (a, b) = bytes.split_at_mut(row);
                a.swap_with_slice(&mut b[..row]);
            }),
        ),
        (
            "rotary angles of the next position",
            Fault::Angles(|bytes, row| {
                let end = bytes.len();
                bytes.copy_within(row..end, 0);
            }),
        ),
    ]
}

/// A copy of a checkpoint of bf16 with another tensor.
fn changed(folder: &Path, name: &str, change: fn(&mut [u8], usize)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(folder.join(file), copy.path().join(file)).unwrap();
    }
    let path = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (range, row_bytes) = {
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        let first = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        (first..first + tensor.data().len(), tensor.shape()[1] * 2)
    };
    let before = bytes[range.clone()].to_vec();
    change(&mut bytes[range.clone()], row_bytes);
    assert_ne!(before, bytes[range], "the fault changes something");
    fs::write(&path, bytes).unwrap();
    copy
}

fn change_angles(schedule: &Schedule, bytes: &mut [u8], change: fn(&mut [u8], usize)) {
    let table = schedule.program.buffers.iter().position(|buffer| buffer.name == "rope.r0").expect("a table of angles");
    let buffer = &schedule.program.buffers[table];
    let (at, row_bytes) = (schedule.placement[table].unwrap() as usize, buffer.cols as usize * buffer.dtype.bytes());
    change(&mut bytes[at..at + buffer.rows as usize * row_bytes], row_bytes);
}

/// A model as the reference has it, and what is expected of every schedule.
struct Right {
    folder: PathBuf,
    stored: Stored,
    target: Target,
    imported: Imported,
    validated: Validated,
    expected: Option<Expected>,
}

impl Right {
    fn new(folder: &Path, stored: Stored) -> Right {
        let target = Target::builtin("cpu").unwrap();
        let (_, precision, format) = stored;
        let imported = read(folder, format);
        let validated = place(&imported.graph, &target, precision);
        let mut right = Right { folder: folder.to_path_buf(), stored, target, imported, validated, expected: None };
        if precision.cache != DType::E4m3 {
            let bytes = right.pack(&right.imported, &right.validated);
            right.expected = Some(expect_cpu(&right.subject(&right.validated, bytes), &|| {}).unwrap());
        }
        right
    }

    fn pack(&self, imported: &Imported, validated: &Validated) -> Vec<u8> {
        pack(validated.schedule(), &imported.graph, &imported.weights).unwrap()
    }

    fn subject<'a>(&'a self, validated: &'a Validated, bytes: Vec<u8>) -> Subject<'a> {
        Subject {
            validated,
            target: &self.target,
            graph: &self.imported.graph,
            weights: &self.imported.weights,
            pack: Arc::new(bytes),
            positions: &POSITIONS,
            alone: None,
        }
    }

    fn checked(&self, validated: &Validated, bytes: Vec<u8>) -> Result<Figures, CheckError> {
        let subject = self.subject(validated, bytes);
        let Some(expected) = &self.expected else { return Ok(check_cpu(&subject, &|| {})?.figures()) };
        let mut fast = Interp::new(validated.schedule(), subject.pack.clone(), Options::fast())?;
        Ok(compare_cpu(&subject, expected, &mut fast)?.figures())
    }

    fn checked_with(&self, fault: &Fault) -> Result<Figures, CheckError> {
        let (_, precision, format) = self.stored;
        match fault {
            Fault::Graph(change) => {
                let mut other = read(&self.folder, format);
                change(&mut other.graph);
                let validated = place(&other.graph, &self.target, precision);
                self.checked(&validated, self.pack(&other, &validated))
            }
            Fault::Weights(name, change) => {
                let copy = changed(&self.folder, name, *change);
                let other = read(copy.path(), format);
                self.checked(&self.validated, self.pack(&other, &self.validated))
            }
            Fault::Angles(change) => {
                let mut bytes = self.pack(&self.imported, &self.validated);
                change_angles(self.validated.schedule(), &mut bytes, *change);
                self.checked(&self.validated, bytes)
            }
        }
    }

    fn passes(&self) {
        let (name, ..) = self.stored;
        let folder = self.folder.display();
        let bytes = self.pack(&self.imported, &self.validated);
        let figures = self.checked(&self.validated, bytes).unwrap_or_else(|error| panic!("{folder}, {name}: {error}"));
        assert_eq!(figures.positions as usize, POSITIONS.len());
        println!("{folder}, {name}: sound: {:.3} of the tolerance, {figures:?}", figures.of_tolerance);
    }

    fn refuses(&self, what: &str, fault: &Fault) {
        let (name, ..) = self.stored;
        let folder = self.folder.display();
        let error = self.checked_with(fault).expect_err(&format!("{folder}, {name}: {what}"));
        let of_tolerance = match &error {
            CheckError::Wrong { expected, found, .. } | CheckError::Cached { expected, found, .. } => found / expected,
            _ => f64::INFINITY,
        };
        println!("{folder}, {name}: {what}: {of_tolerance:.1} times the tolerance: {error}");
        assert!(!matches!(error, CheckError::Interp(_)), "{what}: {error}");
    }
}

fn trained() -> Vec<PathBuf> {
    let more = std::env::var("MONOBLOC_TRAINED").unwrap_or_default();
    let more: Vec<PathBuf> = more.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from).collect();
    if more.is_empty() {
        println!("only tinystories-llama is checked: MONOBLOC_TRAINED names no folders of other checkpoints");
    }
    [fixture("tinystories-llama")].into_iter().chain(more).collect()
}

#[test]
fn trained_weights_pass_and_every_fault_is_refused() {
    for folder in trained() {
        for stored in FORMATS {
            let right = Right::new(&folder, stored);
            right.passes();
            faults().iter().for_each(|(what, fault)| right.refuses(what, fault));
        }
    }
}

#[test]
fn faults_are_refused_with_a_cache_in_fp8() {
    let right = Right::new(&fixture("tinystories-llama"), ("cache in fp8", CACHE_FP8, None));
    right.passes();
    for (what, fault) in faults() {
        right.refuses(what, &fault);
    }
}

/// The weights of this fixture are no trained ones, but it has biases.
#[test]
fn a_missing_bias_is_refused() {
    let biases: [(&str, Change); 4] = [
        ("bias of queries", |graph| graph.layers[0].attention_mut().unwrap().q.bias = None),
        ("bias of keys", |graph| graph.layers[1].attention_mut().unwrap().k.bias = None),
        ("bias of values", |graph| graph.layers[1].attention_mut().unwrap().v.bias = None),
        ("bias of the output of attention", |graph| graph.layers[0].attention_mut().unwrap().o.bias = None),
    ];
    for stored in [FORMATS[0], FORMATS[1], FORMATS[2]] {
        let target = Target::builtin("cpu").unwrap();
        let (name, precision, format) = stored;
        let folder = fixture("families/llama-bias");
        let imported = read(&folder, format);
        let checked = |change: Option<Change>| {
            let mut other = read(&folder, format);
            change.iter().for_each(|change| change(&mut other.graph));
            let of_other = place(&other.graph, &target, precision);
            let bytes = pack(of_other.schedule(), &other.graph, &other.weights).unwrap();
            let subject = Subject {
                validated: &of_other,
                target: &target,
                graph: &imported.graph,
                weights: &imported.weights,
                pack: Arc::new(bytes),
                positions: &[0, 1, 31, 200],
                alone: None,
            };
            check_cpu(&subject, &|| {})
        };
        let sound = checked(None).unwrap_or_else(|error| panic!("{name}: {error}")).figures();
        println!("llama-bias, {name}: sound: {:.3} of the tolerance", sound.of_tolerance);
        for (what, change) in biases {
            let error = checked(Some(change)).expect_err(&format!("{name}: {what}"));
            println!("llama-bias, {name}: without a {what}: {error}");
        }
    }
}
