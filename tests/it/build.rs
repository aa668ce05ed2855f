//! Whole builds into a cache of their own: which stages run, what a change of one field costs, what damage costs.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use monobloc::cache::Cache;
use monobloc::flywheel::Corpus;
use monobloc::manifest::Manifest;
use monobloc::pipeline::{BuildReport, Workspace, build, explain, prepare, show};
use monobloc::report::Report;
use monobloc::sample::SampleSettings;

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
