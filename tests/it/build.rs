//! Tests whole builds in a separate cache: which stages run at first, after a change of each field, and after damage.

use std::cell::Cell;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use monobloc::cache::Cache;
use monobloc::check::{CheckError, Subject, check_cpu, expect_steps};
use monobloc::cuda::driver::Device;
use monobloc::error::Tier;
use monobloc::flywheel::Corpus;
use monobloc::manifest::Manifest;
use monobloc::model::config::Imported;
use monobloc::pack::pack;
use monobloc::pipeline::{Answer, BuildReport, Runner, Workspace, build, explain, prepare, show};
use monobloc::report::Report;
use monobloc::sample::{Penalties, RequestSettings, SampleSettings};

use super::support::{Goldens, fixture, max_difference};

/// A folder with a cache and trials, and the manifest that is built into it.
struct Bench {
    folder: tempfile::TempDir,
}

/// Small enough that every stage takes milliseconds, and every field is written.
const TINY: &str = "[model]
source = \"path:MODEL\"

[precision]
weights = \"fp32\"

[decode]
context_max = 48
steps_per_launch = 4
check_positions = [0, 5, 20]
time_positions = [8]

[[target]]
record = \"cpu\"
";

impl Bench {
    fn new() -> Bench {
        Bench { folder: tempfile::tempdir().expect("temporary folder") }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn workspace(&self) -> Workspace {
        Workspace {
            cache: Cache::open(self.path().join("cache")).expect("cache"),
            report: Report::quiet(),
            trials: self.path().join("trials.csv"),
        }
    }

    fn manifest(&self, text: &str) -> Manifest {
        let model = fixture("families/llama-gqa");
        let text = text.replace("MODEL", &model.display().to_string());
        Manifest::parse(&text, &self.path().join("tiny.toml")).unwrap_or_else(|error| panic!("{error}"))
    }

    fn build(&self, text: &str) -> (BuildReport, String) {
        let workspace = self.workspace();
        let report = build(&workspace, &self.manifest(text)).unwrap_or_else(|fault| panic!("{fault}"));
        (report, workspace.report.summary())
    }

    fn rows(&self) -> Vec<monobloc::flywheel::Trial> {
        Corpus::read(&[self.path().join("trials.csv")]).expect("trials").trials
    }
}

#[test]
fn a_build_runs_every_stage_once_and_then_has_no_work() {
    let bench = Bench::new();
    let (report, summary) = bench.build(TINY);
    // import, schedule, pack, check, measure.
    assert_eq!((report.ran, report.cached, summary.as_str()), (5, 0, "ran 5 stages"));
    assert!(report.waiting.is_empty());
    let rows = bench.rows();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].verdict().name(), "ok");
    assert_eq!(rows[0].facts().manifest, "tiny");
    let check = rows[0].verdict().check().expect("checked");
    assert_eq!((check.positions, check.argmax_agree), (3, 3));
    assert!(check.error_abs_max < 3e-4, "{check:?}");
    let timing = rows[0].verdict().timing().expect("timed");
    assert_eq!((timing.position, timing.steps_per_launch), (8, 4));

    let (report, summary) = bench.build(TINY);
    assert_eq!((report.ran, report.cached, summary.as_str()), (0, 5, "no work to do (5 stages cached)"));
    assert_eq!(bench.rows().len(), 1);
}

/// A row of the trials can be built again: its knobs go into the manifest, and omitted knobs keep the default.
#[test]
fn a_manifest_names_the_knobs_of_a_target() {
    let bench = Bench::new();
    let with = |knobs: &str| TINY.replace("record = \"cpu\"", &format!("record = \"cpu\"\ncandidate = \"{knobs}\""));
    bench.build(TINY);
    let (report, _) = bench.build(&with("splits=2; sms=3"));
    assert_eq!((report.ran, report.cached), (3, 2), "all but the import and the pack");
    let built = bench.rows().pop().expect("a row").facts().point.candidate.clone();
    assert!(built.starts_with("sms=3;") && built.contains(";splits=2;"), "{built}");
    let (report, summary) = bench.build(&with(&built));
    assert_eq!(
        (report.ran, summary.as_str()),
        (0, "no work to do (5 stages cached)"),
        "what a row holds is the same point"
    );
    bench.build(TINY);

    let fault = |knobs: &str| {
        build(&bench.workspace(), &bench.manifest(&with(knobs))).expect_err("a candidate that is none").to_string()
    };
    let (unknown, too_many) = (fault("sns=3"), fault("sms=99"));
    assert!(unknown.contains("the `candidate` of target `cpu`: unknown knob `sns`"), "{unknown}");
    assert!(
        too_many.contains("`sms` is 99, expected 1 to 4") && too_many.contains("change the manifest's `candidate`"),
        "{too_many}"
    );
}

/// Collects the lines of a report.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("lines").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Bench {
    /// Builds, and names the stages that ran, without their target.
    fn ran(&self, text: &str) -> String {
        let lines = Lines::default();
        let workspace = Workspace { report: Report::to_writer(Box::new(lines.clone())), ..self.workspace() };
        build(&workspace, &self.manifest(text)).unwrap_or_else(|fault| panic!("{fault}"));
        let text = String::from_utf8(lines.0.lock().expect("lines").clone()).expect("text");
        let ran = text.lines().filter_map(|line| line.strip_prefix("   run "));
        ran.map(|line| line.split([' ', ':']).next().unwrap_or_default()).collect::<Vec<_>>().join(" ")
    }

    /// A copy of the model whose files a test may change.
    fn copy_model(&self) -> PathBuf {
        let copy = self.path().join("model");
        fs::create_dir_all(&copy).expect("folder");
        for file in ["config.json", "model.safetensors"] {
            fs::copy(fixture("families/llama-gqa").join(file), copy.join(file)).expect("copy");
        }
        copy
    }

    fn entries(&self, stage: &str) -> Vec<PathBuf> {
        let mut found = vec![];
        let mut folders = vec![self.path().join(format!("cache/{stage}-v1"))];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("bucket") {
                let path = entry.expect("entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_none() {
                    found.push(path);
                }
            }
        }
        found
    }
}

#[test]
fn each_field_of_a_manifest_runs_the_stages_that_depend_on_it_and_no_other() {
    let bench = Bench::new();
    assert_eq!(bench.ran(TINY), "import schedule pack check measure");
    for (old, new, expected) in [
        ("[model]", "name = \"other\"\n[model]", ""),
        ("[[target]]", "[search]\ntrials = 0\nminutes = 3\nseed = 4\nmargin = 0.2\n[[target]]", ""),
        ("weights = \"fp32\"", "weights = \"fp32\"\ncache = \"bf16\"", "schedule pack check measure"),
        ("weights = \"fp32\"", "weights = \"fp32\"\nactivations = \"bf16\"", "schedule pack check measure"),
        ("weights = \"fp32\"", "weights = \"bf16\"", "schedule pack check measure"),
        ("context_max = 48", "context_max = 40", "schedule pack check measure"),
        ("steps_per_launch = 4", "steps_per_launch = 3", "measure"),
        ("check_positions = [0, 5, 20]", "check_positions = [0, 6, 20]", "check"),
        ("time_positions = [8]", "time_positions = [9]", "measure"),
    ] {
        let changed = TINY.replace(old, new);
        assert_ne!(changed, TINY, "{old}");
        assert_eq!(bench.ran(&changed), expected, "{new}");
        assert_eq!(bench.ran(&changed), "", "{new}, again");
    }
}

#[test]
fn a_target_runs_what_depends_on_the_figure_that_changed() {
    let bench = Bench::new();
    let record = |lines: &str| {
        let text = monobloc::target::TargetRecord::builtin("cpu").expect("builtin").to_toml() + lines;
        fs::write(bench.path().join("own.toml"), text).expect("record");
    };
    let own = TINY.replace("\"cpu\"", &format!("{:?}", bench.path().join("own.toml")));
    record("");
    assert_eq!(bench.ran(&own), "import schedule pack check measure");
    record("[measured]\nhop_idle_us = 2\n");
    assert_eq!(bench.ran(&own), "");
    record("[measured]\nhop_idle_us = 2\nread_bytes_per_s = 1e15\n");
    assert_eq!(bench.ran(&own), "measure");
    let floor = bench.rows().last().and_then(|row| row.verdict().timing().map(|timing| timing.floor_us));
    assert!(floor.flatten().is_some_and(|floor| floor > 0.0 && floor < 1.0), "{floor:?}");
    // With this bandwidth the floor is above the measured time, so the time is withheld, and the row says why.
    record("[measured]\nread_bytes_per_s = 1\n");
    assert_eq!(bench.ran(&own), "measure");
    let rows = bench.rows();
    let verdict = rows.last().expect("row").verdict();
    assert_eq!(verdict.name(), "fail");
    assert!(verdict.detail().contains("is below the floor of"), "{}", verdict.detail());
}

#[test]
fn a_change_that_leaves_a_result_as_it_was_stops_there() {
    let bench = Bench::new();
    let model = bench.copy_model();
    let text = TINY.replace("MODEL", &model.display().to_string());
    assert_eq!(bench.ran(&text), "import schedule pack check measure");
    let config = model.join("config.json");
    let spaced = fs::read_to_string(&config).expect("config").replace(':', " : ");
    fs::write(&config, spaced).expect("write");
    assert_eq!(bench.ran(&text), "import");
    // Another weight value: the graph stays the same, the logits do not.
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("weights");
    let last = bytes.len() - 3;
    bytes[last] ^= 0x20;
    fs::write(&weights, bytes).expect("write");
    assert_eq!(bench.ran(&text), "pack check measure");
}

#[test]
fn seeds_and_shapes_of_synthetic_models_are_told_apart_and_no_pack_is_stored() {
    let bench = Bench::new();
    fs::copy(fixture("families/llama-gqa/config.json"), bench.path().join("config.json")).expect("copy");
    let text = TINY.replace("path:MODEL", "synthetic:config.json");
    assert_eq!(bench.ran(&text), "import schedule check measure");
    assert_eq!(bench.ran(&text.replace("[precision]", "seed = 1\n[precision]")), "check measure");
    assert!(!bench.path().join("cache/pack-v1").exists());
}

#[test]
fn a_damaged_entry_is_built_again_and_nothing_else() {
    let bench = Bench::new();
    bench.build(TINY);
    for stage in ["import", "schedule", "pack", "check", "measure"] {
        let entries = bench.entries(stage);
        assert_eq!(entries.len(), 1, "{stage}: {entries:?}");
        let mut bytes = fs::read(&entries[0]).expect("entry");
        let middle = bytes.len() / 3;
        bytes[middle] ^= 1;
        fs::write(&entries[0], bytes).expect("write");
        assert_eq!(bench.ran(TINY), stage);
        assert_eq!(bench.ran(TINY), "");
    }
    let problems = bench.workspace().cache.verify(&mut |_, _| {}).expect("verify");
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn builds_at_the_same_time_share_one_cache_and_measure_once() {
    let bench = Bench::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| bench.build(TINY));
        }
    });
    assert_eq!(bench.rows().len(), 1);
    assert_eq!(bench.ran(TINY), "");
}

#[test]
fn explain_names_what_would_run_and_the_line_that_changed() {
    let bench = Bench::new();
    let explained = |text: &str| {
        let all = explain(&bench.workspace(), &bench.manifest(text)).unwrap_or_else(|fault| panic!("{fault}"));
        let lines = all.into_iter().filter(|e| !e.cached);
        lines.map(|e| format!("{} {}: {}", e.target, e.stage, e.lines.join("; "))).collect::<Vec<_>>()
    };
    assert_eq!(explained(TINY)[..2], [" import: never built", "cpu schedule: never built"]);
    bench.build(TINY);
    assert!(explained(TINY).is_empty());
    assert_eq!(
        explained(&TINY.replace("context_max = 48", "context_max = 40")),
        [
            "cpu schedule: context_max: 48 -> 40",
            "cpu pack: its input changes: schedule runs first",
            "cpu check: its input changes: schedule runs first",
            "cpu measure: its input changes: schedule runs first",
        ]
    );
    assert_eq!(explained(&TINY.replace("[0, 5, 20]", "[0, 20]")), ["cpu check: check_positions: removed 5"]);
}

#[test]
fn every_stage_can_be_shown() {
    let bench = Bench::new();
    let (workspace, manifest) = (bench.workspace(), bench.manifest(TINY));
    let shown = |stage: &str| show(&workspace, &manifest, &manifest.targets[0], stage, None);
    bench.build(TINY);
    for (stage, expected) in [
        ("manifest", "decode.context_max 48"),
        ("model", "layer 0"),
        ("candidate", "sms="),
        ("program", "program \"LlamaForCausalLM\" context_max=48"),
        ("schedule", "regime r0 from 0"),
        ("tables", "tasks in a queue"),
        ("why", "[measure]"),
    ] {
        let text = shown(stage).unwrap_or_else(|fault| panic!("{stage}: {fault}"));
        assert!(text.contains(expected), "{stage}: {text}");
    }
    let fault = shown("source").expect_err("the cpu has no kernel");
    assert_eq!(fault.tier, Tier::Input);
    assert!(shown("schedul").expect_err("unknown").to_string().contains("did you mean `schedule`?"));
    // The kernel of a GPU that this machine does not have.
    let h200 = monobloc::target::Target::builtin("h200").expect("builtin");
    let source = show(&workspace, &manifest, &h200, "source", None).unwrap_or_else(|fault| panic!("{fault}"));
    assert!(source.contains("persistent<Machine, Dispatch>"), "{source}");
}

#[test]
fn kernels_do_not_depend_on_the_name_of_a_manifest() {
    let source = |name: &str, stage: &str| {
        // A cache of its own: what another name left there is not taken.
        let bench = Bench::new();
        let config = format!("synthetic:{}/manifests/configs/smollm2-135m.json", env!("CARGO_MANIFEST_DIR"));
        let text = TINY.replace("[model]", &format!("name = {name:?}\n[model]")).replace("path:MODEL", &config);
        let text = text.replace("\"fp32\"", "\"bf16\"").replace("context_max = 48", "context_max = 128");
        let target = monobloc::target::Target::builtin("h200").expect("builtin");
        show(&bench.workspace(), &bench.manifest(&text), &target, stage, None)
            .unwrap_or_else(|fault| panic!("{stage}: {fault}"))
    };
    for stage in ["source", "rows-source", "waves-source", "steps-source"] {
        assert_eq!(source("one", stage), source("other", stage), "{stage}");
    }
}

#[test]
fn a_gpu_that_is_absent_is_waited_for_and_everything_else_is_built() {
    const NAME: &str = "a_gpu_that_is_absent_is_waited_for_and_everything_else_is_built";
    if Device::list().is_ok() {
        return super::skipped(NAME, "machine without a GPU", "one is here");
    }
    let bench = Bench::new();
    let both = format!("{TINY}\n[[target]]\nrecord = \"h200\"\n");
    let (report, _) = bench.build(&both);
    assert_eq!(report.waiting.len(), 1, "{report:?}");
    assert!(report.waiting[0].starts_with("h200: "), "{report:?}");
    // import; schedule, pack, check, measure of the CPU; schedule, source, and with a compiler compile.
    let compiled = usize::from(report.waiting[0].contains("check and measure wait for a device"));
    assert_eq!(report.ran, 7 + compiled, "{report:?}");
    let (report, summary) = bench.build(&both);
    assert_eq!((report.ran, report.waiting.len()), (0, 1));
    assert!(summary.starts_with("no work to do"), "{summary}");
    assert_eq!(bench.rows().len(), 1);
}

#[test]
fn a_target_that_the_model_does_not_fit_is_refused_with_the_reason() {
    let bench = Bench::new();
    let text = monobloc::target::TargetRecord::builtin("cpu").expect("builtin").to_toml();
    fs::write(bench.path().join("own.toml"), text.replace("262_144", "16_384")).expect("record");
    // Two chunks of sixteen rows of a head of 256.
    let wide = fixture("variants/mistral-head-256").display().to_string();
    let own = TINY.replace("\"cpu\"", &format!("{:?}", bench.path().join("own.toml"))).replace("MODEL", &wide);
    let fault = build(&bench.workspace(), &bench.manifest(&own)).expect_err("too small");
    assert_eq!(fault.tier, Tier::Input);
    assert!(fault.message.contains("does not fit `cpu`: shared memory: the plan takes"), "{fault}");
    let rows = bench.rows();
    assert_eq!(rows.iter().map(|row| row.verdict().name()).collect::<Vec<_>>(), ["infeasible"]);
    let fault = build(&bench.workspace(), &bench.manifest(&TINY.replace("48", "100000"))).expect_err("too long");
    assert!(fault.message.contains("`decode.context_max` is 100000, expected at most"), "{fault}");
}

#[test]
fn a_prepared_model_decodes_what_transformers_decodes() {
    let bench = Bench::new();
    let (workspace, manifest) = (bench.workspace(), bench.manifest(TINY));
    let prepared = prepare(&workspace, &manifest, &manifest.targets[0]).unwrap_or_else(|fault| panic!("{fault}"));
    let mut runner = prepared.runner(&workspace).unwrap_or_else(|fault| panic!("{fault}"));
    assert!(runner.place().starts_with("cpu interpreter on "), "{}", runner.place());
    let goldens = Goldens::open("families/llama-gqa");
    let ids = goldens.ids("input_ids");
    let mut rows = vec![];
    runner.logits(&ids, &mut |position, row| rows.push((position, row.to_vec()))).expect("logits");
    assert!(rows.iter().map(|(position, _)| *position).eq(0..ids.len() as u32));
    let logits: Vec<f32> = rows.into_iter().flat_map(|(_, row)| row).collect();
    assert!(max_difference(&logits, &goldens.floats("logits")) < 3e-4);

    let greedy = SampleSettings::greedy();
    let expected = goldens.ids("greedy_ids");
    let mut generate = |prompt: &[u32], count: usize, eos: &[u32], settings: &SampleSettings, stop_after: usize| {
        let mut told = vec![];
        let tokens = runner.generate(prompt, count, eos, settings, &mut |token| {
            told.push(token);
            if told.len() == stop_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        tokens.map(|tokens| {
            assert_eq!(tokens, told);
            tokens
        })
    };
    assert_eq!(generate(&ids, expected.len(), &[], &greedy, 0).expect("greedy"), expected);
    assert_eq!(generate(&ids, 16, &[], &greedy, 2).expect("stopped"), expected[..2]);
    let first = expected.iter().position(|token| *token == expected[3]).expect("it is there");
    assert_eq!(generate(&ids, 16, &[expected[3]], &greedy, 0).expect("eos"), expected[..=first]);
    assert!(generate(&ids, 0, &[], &greedy, 0).expect("none").is_empty());

    let sampling = SampleSettings { temperature: 0.9, top_k: Some(20), top_p: Some(0.95), seed: 5 };
    let sampled = generate(&ids, 8, &[], &sampling, 0).expect("sampled");
    assert_eq!(generate(&ids, 8, &[], &sampling, 0).expect("again"), sampled);
    assert_eq!(sampled.len(), 8);
    let other = SampleSettings { seed: 6, ..sampling };
    assert_ne!(generate(&ids, 8, &[], &other, 0).expect("another seed"), sampled);

    // The context ends the generation: the last token is chosen after the last position.
    assert_eq!(generate(&[1; 47], 100, &[], &greedy, 0).expect("to the end").len(), 2);
    let fault = generate(&[1; 49], 1, &[], &greedy, 0).expect_err("too long");
    assert_eq!((fault.tier, fault.message.as_str()), (Tier::Input, "the prompt has 49 tokens, `context_max` is 48"));
    assert_eq!(generate(&[], 1, &[], &greedy, 0).expect_err("empty").tier, Tier::Input);
    assert_eq!(generate(&[1_000_000], 1, &[], &greedy, 0).expect_err("no such token").tier, Tier::Input);
}

/// A longer conversation gets the same tokens as if it were decoded from the beginning, but decodes only its new tokens.
#[test]
fn a_sequence_continues_from_the_cache() {
    let bench = Bench::new();
    let (workspace, manifest) = (bench.workspace(), bench.manifest(TINY));
    let prepared = prepare(&workspace, &manifest, &manifest.targets[0]).unwrap_or_else(|fault| panic!("{fault}"));
    let vocab = prepared.imported.graph.vocab;
    let ids = Goldens::open("families/llama-gqa").ids("input_ids");
    let greedy = RequestSettings::plain(SampleSettings::greedy());
    let sampled = RequestSettings::plain(SampleSettings { temperature: 1.1, top_k: Some(40), top_p: None, seed: 3 });
    let penalised = RequestSettings {
        penalties: Penalties { repetition: 1.3, ..Penalties::OFF },
        logprobs: Some(1),
        ..greedy.clone()
    };
    for settings in [greedy, sampled, penalised] {
        let request = settings.resolve(vocab, &[]).expect("valid settings");
        let answer = |runner: &mut Runner<'_>, prompt: &[u32], stop_after: usize| {
            let mut told = 0;
            let answer = runner.answer(prompt, 6, &request, &mut |_| {
                told += 1;
                if told == stop_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            answer.unwrap_or_else(|fault| panic!("{fault}"))
        };
        let fresh = |prompt: &[u32]| {
            let mut runner = prepared.runner(&workspace).unwrap_or_else(|fault| panic!("{fault}"));
            answer(&mut runner, prompt, 0).tokens
        };
        let mut runner = prepared.runner(&workspace).unwrap_or_else(|fault| panic!("{fault}"));
        let first = answer(&mut runner, &ids[..12], 0);
        assert_eq!((first.reused, &first.tokens), (0, &fresh(&ids[..12])));
        // The answer and another message: the last token of the answer was chosen and never decoded.
        let longer: Vec<u32> = ids[..12].iter().chain(&first.tokens).chain(&ids[12..16]).copied().collect();
        let second = answer(&mut runner, &longer, 0);
        assert_eq!((second.reused, &second.tokens), (17, &fresh(&longer)));
        // Another message at the same place, an answer that is stopped, and the same question again.
        let mut other = longer.clone();
        other[14] ^= 1;
        let third = answer(&mut runner, &other, 3);
        assert_eq!((third.reused, &third.tokens[..]), (14, &fresh(&other)[..3]));
        let again = answer(&mut runner, &other, 0);
        assert_eq!((again.reused, &again.tokens), (other.len() - 1, &fresh(&other)));
        // Logits are decoded from the first position on, and leave no sequence that could be continued.
        runner.logits(&ids[..3], &mut |_, _| {}).expect("logits");
        assert_eq!(answer(&mut runner, &other, 0), Answer { reused: 0, ..again });
    }
}

#[test]
fn deep_positions_and_bf16_are_checked_against_a_reference_too() {
    let bench = Bench::new();
    for precision in ["fp32", "bf16"] {
        let text = TINY
            .replace("MODEL", &fixture("tinystories-llama").display().to_string())
            .replace("\"fp32\"", &format!("{precision:?}"))
            .replace("context_max = 48", "context_max = 2048")
            .replace("[0, 5, 20]", "[0, 31, 2047]");
        bench.build(&text);
        let rows = bench.rows();
        let check = rows.last().and_then(|row| row.verdict().check()).expect("checked");
        assert_eq!((check.positions, check.argmax_agree), (3, 3), "{precision}: {check:?}");
        assert!(check.error_rel_l2 > 0.0 && check.kl_max >= 0.0, "{check:?}");
    }
}

#[test]
fn a_pack_with_one_wrong_weight_does_not_pass_the_check() {
    let bench = Bench::new();
    let (workspace, manifest) = (bench.workspace(), bench.manifest(TINY));
    let prepared = prepare(&workspace, &manifest, &manifest.targets[0]).unwrap_or_else(|fault| panic!("{fault}"));
    let Imported { graph, weights, .. } = &prepared.imported;
    let good = pack(prepared.validated.schedule(), graph, weights).expect("pack");
    let checked = |bytes: Vec<u8>| {
        let (validated, target) = (&prepared.validated, &prepared.target);
        let positions = &manifest.decode.check_positions;
        let subject = Subject { validated, target, graph, weights, pack: Arc::new(bytes), positions, alone: None };
        let steps = Cell::new(0);
        let checked = check_cpu(&subject, &|| steps.set(steps.get() + 1));
        // The reference reads the checkpoint, so it computes all layers and the head with any pack.
        let all = graph.layers.len() as u64 + 1;
        assert_eq!((steps.get(), expect_steps(&subject, false)), (all, all));
        checked
    };
    assert_eq!(checked(good.clone()).expect("good").figures().positions, 3);
    // The exponent of one weight of a query: the value was about 0.01, and is huge now.
    let schedule = prepared.validated.schedule();
    let queries = schedule.program.buffers.iter().position(|b| b.name == "qkv.0.weight").expect("a matrix");
    let mut bad = good;
    bad[schedule.placement[queries].expect("a place") as usize + 3] ^= 0x40;
    let error = checked(bad).expect_err("bad");
    assert!(matches!(error, CheckError::Wrong { .. } | CheckError::NotFinite { .. }), "{error}");
    // Position 0 is right with any query, because attention sees one row there. The second position shows the fault.
    assert_eq!(error.figures().map(|figures| figures.positions), Some(2));
}
