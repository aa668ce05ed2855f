//! Text in, text out: the files under `tests/filetests`.
//!
//! The first line of a file names its test and, for `validate`, the target record. An expected fault is written on the line that
//! causes it, after `; error: `. A missing fault and an unexpected fault both fail the test.
//! `BLESS=1 cargo test --test it filetests` writes the actual faults into the files; read the diff.
//!
//! - `parse`: the file is read. A file without faults is in canonical form: printing gives the same text.
//! - `validate`: the schedule is judged. A violation reads `rule: message` on the line of its entity; that of an SM on
//!   the line of its queue, or of its stream if the rule is about the stream's order. Each rule has a file of its name that
//!   violates it; files called `proven-` have no violation.
//! - `waves`: files called `proven-` are plans that are derived for a toy, after the schedule that they are plans of. Any other file is a plan of the
//!   schedule of the one that its first line names. A violation is on the line of its wave, or on the first one. Each rule of plans has a file of its
//!   name, but for `alike`, which is about several plans.
//! - `lower`: the file is the result of lowering the model below with the file's name, for two workers of a CPU. It is
//!   proven, too.
//! - `codegen`: the file is the kernel for the record, the model and the type that its first line names.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::ir::parse::{parse, parse_with_lines};
use monobloc::ir::print::{FAULT, mark, print};
use monobloc::lower::lower;
use monobloc::model::graph::{
    Act, Attention, FeedForward, Layer, Linear, Mixer, Mlp, ModelGraph, Norm, NormKind, QkNorm, QkNormSpan, Rope,
    RopeId, RowView, Tensor, TensorId,
};
use monobloc::schedule::schedule;
use monobloc::target::{CopyMechanism, DotMechanism, Spec, Target, TargetKind};
use monobloc::text::Diagnostic;
use monobloc::validate::{Rule, check, line_of, validate};
use monobloc::waves::parse::parse as parse_plans;
use monobloc::waves::{self, Form, Plan, derive};

use crate::proof_support::{MIXTURE, TOY, Toy};

#[test]
fn parse_files() {
    check_directory("parse", |_, text| match parse(text) {
        Err(error) => {
            let Diagnostic { title, span, label, help } = error.diagnostic;
            let help = help.map_or(String::new(), |help| format!(" ({help})"));
            mark(text, &[(span.start, format!("{title}: {label}{help}"))])
        }
        Ok(read) => format!("{}\n{}", first_line(text), print(&read)),
    });
}

#[test]
fn validate_files() {
    let mut tripped = BTreeSet::new();
    check_directory("validate", |name, text| {
        let target = first_line(text).split(' ').nth(3).and_then(Target::builtin).expect("a builtin target");
        let (schedule, lines) = parse_with_lines(text).unwrap_or_else(|error| panic!("{error}"));
        let violations = check(&schedule, &target);
        assert_eq!(violations.is_empty(), name.starts_with("proven"), "{name}: {violations:?}");
        tripped.extend(violations.iter().map(|violation| violation.rule).filter(|rule| rule.name() == name));
        let faults: Vec<(usize, String)> = violations
            .iter()
            .map(|violation| {
                (
                    line_of(violation.entity, violation.rule, &lines).start,
                    format!("{}: {}", violation.rule, violation.message),
                )
            })
            .collect();
        mark(text, &faults)
    });
    let missing: Vec<&Rule> = Rule::ALL.iter().filter(|rule| rule.group() <= 7 && !tripped.contains(rule)).collect();
    assert!(missing.is_empty(), "no file of their name trips {missing:?}");
}

#[test]
fn waves_files() {
    let h200 = Target::builtin("h200").unwrap();
    let mut tripped = BTreeSet::new();
    check_directory("waves", |name, text| {
        if name.starts_with("proven") {
            return format!("{}\n{}", first_line(text), derived(name));
        }
        let base = first_line(text)
            .split([' ', ';'])
            .filter(|word| !word.is_empty())
            .nth(3)
            .expect("the file with its schedule");
        let base = fs::read_to_string(root().join(format!("waves/{base}.mkir"))).unwrap();
        let schedule = &base[..=base.find("\nwaves ").expect("a plan")];
        // The first line of a file is a comment, and takes the place of nothing.
        let both = format!("{schedule}{text}");
        let read = parse_plans(&both).unwrap_or_else(|error| panic!("{name}: {error}"));
        let validated = validate(read.schedule, &h200).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let found = waves::check(read.plans.iter().map(|(plan, _)| plan.clone()), &validated, &h200);
        assert!(found.iter().any(|violations| !violations.is_empty()), "{name}: proven");
        let faults = found.into_iter().zip(&read.plans).flat_map(|(violations, (_, lines))| {
            violations.into_iter().map(move |of| {
                let at = line_of(of.entity, of.rule, lines).start;
                (of.rule, (at - schedule.len(), format!("{}: {}", of.rule, of.message)))
            })
        });
        let (rules, faults): (Vec<_>, Vec<_>) = faults.unzip();
        tripped.extend(rules.into_iter().filter(|rule| rule.name() == name));
        mark(text, &faults)
    });
    let of_plans = Rule::ALL.iter().filter(|rule| rule.group() == 8 && **rule != Rule::Alike);
    let missing: Vec<&Rule> = of_plans.filter(|rule| !tripped.contains(rule)).collect();
    assert!(missing.is_empty(), "no file of their name trips {missing:?}");
}

/// Plans of a toy on four SMs of an H200: steps, or a chunk and its tail; of experts, or with pairs of blocks.
fn derived(name: &str) -> String {
    let mut target = Target::builtin("h200").unwrap();
    target.spec.sm_count = 4;
    let small = Toy { layers: 1, heads: 2, kv_heads: 1, dim: 64, intermediate: 64, vocab: 64, ..TOY };
    let toy = match name {
        "proven-experts" => Toy { layers: 2, mixture: Some(MIXTURE), ..small },
        _ => small,
    };
    let graph = toy.graph();
    let base = Candidate { unit_rows: 8, ..Candidate::default_for(&graph, &target, toy.precision) };
    let room = Room { rows: 4, sequences: 4, positions: 256 };
    let placed = place_rows(&graph, "toy", toy.precision, toy.context, &target, &base, room);
    let placed = placed.unwrap_or_else(|reason| panic!("{name}: {reason}"));
    let forms = match name {
        "proven-chunk" => vec![(Form::Chunk, 256), (Form::Tail, 16)],
        _ => vec![(Form::Steps, 16)],
    };
    let plan = |(form, rows)| derive(&placed, &target, form, rows).unwrap_or_else(|reason| panic!("{name}: {reason}"));
    let plans: Vec<Plan> = forms.into_iter().map(plan).collect();
    let printed = waves::print(&placed, &plans);
    let read = parse_plans(&printed).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(read.schedule, placed);
    assert!(read.plans.into_iter().map(|(plan, _)| plan).eq(plans.iter().cloned()), "{name}");
    let validated = validate(placed, &Target::builtin("h200").unwrap()).unwrap_or_else(|rejected| panic!("{rejected}"));
    let found = waves::check(plans, &validated, &Target::builtin("h200").unwrap());
    assert!(found.iter().all(Vec::is_empty), "{name}: {found:?}");
    printed
}

#[test]
fn lower_files() {
    check_directory("lower", |name, text| {
        let (graph, candidate) = model(name);
        let precision = Precision { weights: DType::Bf16, cache: DType::F32, wire: DType::F32 };
        let target = cpu();
        let base = Candidate::default_for(&graph, &target, precision);
        let candidate = Candidate::parse(candidate, &base).unwrap();
        let program = lower(&graph, name, precision, 64, &candidate).unwrap();
        let placed = schedule(program, &target, &candidate).unwrap();
        let printed = print(&placed);
        assert_eq!(parse(&printed).as_ref(), Ok(&placed), "{name}");
        assert_eq!(check(&placed, &target), [], "{name}");
        format!("{}\n{printed}", first_line(text))
    });
}

#[test]
fn codegen_files() {
    check_directory("codegen", |name, text| {
        let words: Vec<&str> = first_line(text).split_whitespace().collect();
        let [_, _, _, record, of, dtype] = words[..] else { panic!("{name}: expected a record, a model and a type") };
        let target = Target::builtin(record).unwrap();
        assert_eq!(
            target.spec.copy.to_string(),
            name,
            "a file has the name of the way into shared memory that it shows"
        );
        let dtype = if dtype == "fp32" { DType::F32 } else { DType::Bf16 };
        let precision = Precision { weights: dtype, cache: dtype, wire: dtype };
        let (graph, _) = model(of);
        let candidate = Candidate::default_for(&graph, &target, precision);
        let program = lower(&graph, of, precision, 64, &candidate).unwrap();
        let placed = schedule(program, &target, &candidate).unwrap();
        let proven = validate(placed, &target).unwrap_or_else(|rejected| panic!("{rejected}"));
        format!("{}\n{}", first_line(text), emit(&proven, &target, Trace::Off).text)
    });
}

#[test]
fn every_directory_has_a_test() {
    let mut names: Vec<String> =
        fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["codegen", "lower", "parse", "validate", "waves"]);
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests")
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// Compares every file of a directory with the output of `actual` for its name and its text without faults.
fn check_directory(directory: &str, mut actual: impl FnMut(&str, &str) -> String) {
    let bless = std::env::var_os("BLESS").is_some_and(|value| value == "1");
    let mut paths: Vec<PathBuf> =
        fs::read_dir(root().join(directory)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "no file in {directory}");
    let mut report = String::new();
    for path in paths {
        let expected = fs::read_to_string(&path).unwrap();
        let comment = if path.extension().is_some_and(|extension| extension == "cu") { "//" } else { ";" };
        assert!(first_line(&expected).starts_with(&format!("{comment} test {directory}")), "{}", path.display());
        let actual = actual(path.file_stem().unwrap().to_str().unwrap(), &without_faults(&expected));
        if actual == expected {
            continue;
        }
        if bless {
            fs::write(&path, actual).unwrap();
        } else {
            let name = path.file_name().unwrap().display();
            writeln!(report, "{directory}/{name}\n{}", difference(&expected, &actual)).unwrap();
        }
    }
    assert!(report.is_empty(), "{report}BLESS=1 writes what is found into the files; read the diff");
}

fn without_faults(text: &str) -> String {
    text.split_inclusive('\n')
        .map(|line| match line.find(FAULT) {
            Some(at) => format!("{}{}", line[..at].trim_end(), if line.ends_with('\n') { "\n" } else { "" }),
            None => line.to_string(),
        })
        .collect()
}

/// The first lines that differ.
fn difference(expected: &str, actual: &str) -> String {
    const LINES_MAX: usize = 10;
    let (expected, actual): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), actual.lines().collect());
    let mut out = String::new();
    for i in (0..expected.len().max(actual.len())).filter(|&i| expected.get(i) != actual.get(i)).take(LINES_MAX) {
        for (sign, lines) in [('-', &expected), ('+', &actual)] {
            if let Some(line) = lines.get(i) {
                writeln!(out, "  {sign}{:<5} {line}", i + 1).unwrap();
            }
        }
    }
    out
}

/// Two workers of the interpreter.
fn cpu() -> Target {
    Target {
        name: "cpu".to_string(),
        kind: TargetKind::Cpu,
        devices: 1,
        spec: Spec {
            source: "tests".to_string(),
            arch: String::new(),
            device_names: vec![],
            sm_count: 2,
            smem_bytes_per_block_max: 262_144,
            registers_per_sm: 65_536,
            threads_per_block_max: 1024,
            l2_bytes: 0,
            memory_bytes: 1 << 30,
            memory_bytes_per_s: 2e10,
            copy: CopyMechanism::Plain,
            dot: DotMechanism::Fma,
            cluster_max: 1,
            register_reallocation: false,
            warpgroup_mma: false,
            fp8_cvt: false,
        },
    }
}

/// Tensors of a generated checkpoint.
#[derive(Default)]
struct Tensors(Vec<Tensor>);

impl Tensors {
    fn add(&mut self, name: &str, shape: &[u32]) -> TensorId {
        self.0.push(Tensor { name: name.to_string(), dtype: DType::Bf16, shape: shape.to_vec() });
        TensorId::from(self.0.len() - 1)
    }

    fn linear(&mut self, name: &str, rows: u32, cols: u32, bias: bool) -> Linear {
        let weight = RowView::range(self.add(&format!("{name}.weight"), &[rows, cols]), 0);
        let bias = bias.then(|| RowView::range(self.add(&format!("{name}.bias"), &[rows]), 0));
        Linear { weight, bias, rows, cols }
    }

    fn rms(&mut self, name: &str, width: u32, weight_offset: f32) -> Norm {
        Norm { kind: NormKind::Rms, eps: 1e-5, weight: Some(self.add(name, &[width])), weight_offset, bias: None }
    }

    fn layer_norm(&mut self, name: &str, width: u32) -> Norm {
        let bias = Some(self.add(&format!("{name}.bias"), &[width]));
        Norm { kind: NormKind::Layer, bias, ..self.rms(&format!("{name}.weight"), width, 0.0) }
    }
}

const HIDDEN: u32 = 32;
const HEAD_DIM: u32 = 8;
const INTERMEDIATE: u32 = 40;
/// Not a multiple of 8: the last unit of the head is cut off.
const VOCAB: u32 = 61;

fn rope(pairs: u32, base: f32) -> Rope {
    let inv_freq = (0..pairs).map(|i| base.powf(-(i as f32) / pairs as f32)).collect();
    Rope { inv_freq, scale: 1.0, interleaved: false }
}

/// A model, and the knobs that differ from the default candidate.
fn model(name: &str) -> (ModelGraph, &'static str) {
    match name {
        "llama" => (llama(), ""),
        "neox" => (neox(), "mechanism=packets"),
        "gemma" => (gemma(), "splits=2;split_from=24;mechanism=packets"),
        "gemma_everywhere" => (gemma(), "sums_everywhere=1;mechanism=packets"),
        _ => panic!("no model is called `{name}`"),
    }
}

fn graph(family: &str, tensors: Tensors, embed: TensorId, layers: Vec<Layer>, final_norm: Norm) -> ModelGraph {
    ModelGraph {
        family: family.to_string(),
        hidden: HIDDEN,
        vocab: VOCAB,
        positions_max: 128,
        tensors: tensors.0,
        formats: Default::default(),
        embed,
        embed_scale: 1.0,
        joined: None,
        ropes: vec![rope(HEAD_DIM / 2, 10_000.0)],
        layers,
        final_norm,
        // Tied.
        head: Linear { weight: RowView::range(embed, 0), bias: None, rows: VOCAB, cols: HIDDEN },
        logits_scale: 1.0,
        logits_softcap: None,
        eos: vec![2],
        bos: Some(1),
    }
}

/// Grouped queries, gated MLP, tied head, two layers.
fn llama() -> ModelGraph {
    let (heads, kv_heads) = (4, 2);
    let mut t = Tensors::default();
    let embed = t.add("embed", &[VOCAB, HIDDEN]);
    let layers = (0..2)
        .map(|l| Layer {
            attn_norm: Some(t.rms(&format!("{l}.attn_norm"), HIDDEN, 0.0)),
            mixer: Mixer::Attention(Attention {
                heads,
                kv_heads,
                head_dim: HEAD_DIM,
                q: t.linear(&format!("{l}.q"), heads * HEAD_DIM, HIDDEN, false),
                k: t.linear(&format!("{l}.k"), kv_heads * HEAD_DIM, HIDDEN, false),
                v: t.linear(&format!("{l}.v"), kv_heads * HEAD_DIM, HIDDEN, false),
                o: t.linear(&format!("{l}.o"), HIDDEN, heads * HEAD_DIM, false),
                q_norm: None,
                k_norm: None,
                rope: Some(RopeId(0)),
                scale: (HEAD_DIM as f32).sqrt().recip(),
                softcap: None,
                window: None,
                cache_scales: None,
                sinks: None,
                gate: None,
                query_scale: None,
                norm_after_rope: false,
            }),
            attn_post_norm: None,
            mlp_norm: Some(t.rms(&format!("{l}.mlp_norm"), HIDDEN, 0.0)),
            feed: FeedForward::Dense(Mlp {
                act: Act::Silu,
                gate: Some(t.linear(&format!("{l}.gate"), INTERMEDIATE, HIDDEN, false)),
                up: t.linear(&format!("{l}.up"), INTERMEDIATE, HIDDEN, false),
                down: t.linear(&format!("{l}.down"), HIDDEN, INTERMEDIATE, false),
                swiglu: None,
            }),
            mlp_post_norm: None,
            parallel: false,
            residual_scale: 1.0,
        })
        .collect();
    let final_norm = t.rms("norm", HIDDEN, 0.0);
    graph("LlamaForCausalLM", t, embed, layers, final_norm)
}

/// Both branches from one input, LayerNorm, biases, a plain MLP, RoPE over half a head, q, k and v in one tensor.
fn neox() -> ModelGraph {
    let heads = 4;
    let width = heads * HEAD_DIM;
    let mut t = Tensors::default();
    let embed = t.add("embed", &[VOCAB, HIDDEN]);
    let weight = t.add("qkv.weight", &[3 * width, HIDDEN]);
    let bias = t.add("qkv.bias", &[3 * width]);
    // One head after another, each with q, k, v.
    let qkv = |part: u32| {
        let view = |tensor| RowView { tensor, first: part * HEAD_DIM, block: HEAD_DIM, stride: 3 * HEAD_DIM };
        Linear { weight: view(weight), bias: Some(view(bias)), rows: width, cols: HIDDEN }
    };
    let layer = Layer {
        attn_norm: Some(t.layer_norm("attn_norm", HIDDEN)),
        mixer: Mixer::Attention(Attention {
            heads,
            kv_heads: heads,
            head_dim: HEAD_DIM,
            q: qkv(0),
            k: qkv(1),
            v: qkv(2),
            o: t.linear("o", HIDDEN, width, true),
            q_norm: None,
            k_norm: None,
            rope: Some(RopeId(0)),
            scale: (HEAD_DIM as f32).sqrt().recip(),
            softcap: None,
            window: None,
            cache_scales: None,
            sinks: None,
            gate: None,
            query_scale: None,
            norm_after_rope: false,
        }),
        attn_post_norm: None,
        mlp_norm: Some(t.layer_norm("mlp_norm", HIDDEN)),
        feed: FeedForward::Dense(Mlp {
            act: Act::GeluErf,
            gate: None,
            up: t.linear("up", INTERMEDIATE, HIDDEN, true),
            down: t.linear("down", HIDDEN, INTERMEDIATE, true),
            swiglu: None,
        }),
        mlp_post_norm: None,
        parallel: true,
        residual_scale: 1.0,
    };
    let final_norm = t.layer_norm("norm", HIDDEN);
    let ropes = vec![rope(HEAD_DIM / 4, 10_000.0)];
    ModelGraph { ropes, ..graph("GPTNeoXForCausalLM", t, embed, vec![layer], final_norm) }
}

/// Norms after the branches and over heads, soft caps, a window in one layer and a second rotary table in the other,
/// and a history that is split from position 24 on.
fn gemma() -> ModelGraph {
    let heads = 2;
    let width = heads * HEAD_DIM;
    let mut t = Tensors::default();
    let embed = t.add("embed", &[VOCAB, HIDDEN]);
    let layers = (0..2u32)
        .map(|l| {
            let mut norm = |name: &str, width| t.rms(&format!("{l}.{name}"), width, 1.0);
            let (attn_norm, attn_post_norm) = (norm("attn_norm", HIDDEN), norm("attn_post_norm", HIDDEN));
            let (mlp_norm, mlp_post_norm) = (norm("mlp_norm", HIDDEN), norm("mlp_post_norm", HIDDEN));
            let mut qk_norm = |name| {
                let Norm { kind, eps, weight, weight_offset, .. } = norm(name, HEAD_DIM);
                Some(QkNorm { kind, eps, weights: weight.into_iter().collect(), weight_offset, span: QkNormSpan::Head })
            };
            let (q_norm, k_norm) = (qk_norm("q_norm"), qk_norm("k_norm"));
            Layer {
                attn_norm: Some(attn_norm),
                mixer: Mixer::Attention(Attention {
                    heads,
                    kv_heads: 1,
                    head_dim: HEAD_DIM,
                    q: t.linear(&format!("{l}.q"), width, HIDDEN, false),
                    k: t.linear(&format!("{l}.k"), HEAD_DIM, HIDDEN, false),
                    v: t.linear(&format!("{l}.v"), HEAD_DIM, HIDDEN, false),
                    o: t.linear(&format!("{l}.o"), HIDDEN, width, false),
                    q_norm,
                    k_norm,
                    rope: Some(RopeId(l)),
                    scale: 0.25,
                    softcap: Some(50.0),
                    window: (l == 0).then_some(16),
                    cache_scales: None,
                    sinks: None,
                    gate: None,
                    query_scale: None,
                    norm_after_rope: false,
                }),
                attn_post_norm: Some(attn_post_norm),
                mlp_norm: Some(mlp_norm),
                feed: FeedForward::Dense(Mlp {
                    act: Act::GeluTanh,
                    gate: Some(t.linear(&format!("{l}.gate"), INTERMEDIATE, HIDDEN, false)),
                    up: t.linear(&format!("{l}.up"), INTERMEDIATE, HIDDEN, false),
                    down: t.linear(&format!("{l}.down"), HIDDEN, INTERMEDIATE, false),
                    swiglu: None,
                }),
                mlp_post_norm: Some(mlp_post_norm),
                parallel: false,
                residual_scale: 1.0,
            }
        })
        .collect();
    let final_norm = t.rms("norm", HIDDEN, 1.0);
    ModelGraph {
        embed_scale: 5.65625,
        ropes: vec![rope(HEAD_DIM / 2, 10_000.0), rope(HEAD_DIM / 2, 1_000_000.0)],
        logits_softcap: Some(30.0),
        ..graph("Gemma3ForCausalLM", t, embed, layers, final_norm)
    }
}
