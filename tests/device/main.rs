//! Tests that need a device: the generated kernel's numbers, tokens, and behaviour for users. One test for each claim.
//!
//! `cargo test --release --test device NAME -- --nocapture` runs one of them on the first device that a builtin record
//! describes. Without a device, or without NVRTC, each says so and passes; with `MONOBLOC_REQUIRE_GPU=1` it fails.

#[path = "../it/cycle.rs"]
mod cycle;
mod drafts;
mod faults;
mod manners;
mod numbers;
mod races;
mod rows;
// The other crate uses the rest of it.
#[allow(dead_code)]
#[path = "../it/support.rs"]
mod support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use monobloc::cache::{Cache, Places};
use monobloc::cuda::driver::Device;
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::error::Fault;
use monobloc::interp::{Interp, Options, Pack};
use monobloc::manifest::Manifest;
use monobloc::pack::pack;
use monobloc::pipeline::{Prepared, Runner, Workspace, prepare};
use monobloc::report::Report;
use monobloc::target::{CopyMechanism, Spec, Target, TargetRecord};

/// A persistent kernel needs all SMs, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Prints a line that the test harness does not hide, for what was measured and what was skipped.
#[allow(clippy::explicit_write)]
fn say(text: &str) {
    writeln!(std::io::stderr(), "{text}").unwrap();
}

/// A quick compiler for kernels that nothing runs: it finds the same errors. `None`, and a line, if there is no NVRTC.
fn quick_nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::load() {
        Ok(nvrtc) => Some(nvrtc.quick().unwrap_or(nvrtc)),
        Err(error) => {
            say(&format!("SKIPPED (no NVRTC): compiling in {test}: {error}"));
            None
        }
    }
}

/// The device of this machine, for one test at a time.
struct Gpu {
    device: Device,
    /// The builtin record that describes it.
    record: Target,
    nvrtc: Nvrtc,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    /// `None`, and a line that says so, where there is none.
    fn here(test: &str) -> Option<Gpu> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        match Gpu::find() {
            Ok((device, record, nvrtc)) => Some(Gpu { device, record, nvrtc, _turn: turn }),
            Err(reason) if std::env::var_os("MONOBLOC_REQUIRE_GPU").is_some_and(|value| value == "1") => {
                panic!("`MONOBLOC_REQUIRE_GPU` is set, but {reason}")
            }
            Err(reason) => {
                say(&format!("SKIPPED (no GPU): {test}: {}", reason.lines().next().unwrap_or_default()));
                None
            }
        }
    }

    fn find() -> Result<(Device, Target, Nvrtc), String> {
        let text = |error: Fault| error.to_string();
        let devices = Device::list().map_err(|error| text(error.into()))?;
        let described = |record: &Target| devices.iter().find(|device| device.matches(record).is_ok());
        let mut records = Target::builtin_names().filter_map(Target::builtin);
        let record = records.find(|record| described(record).is_some()).ok_or("no builtin record describes its GPU")?;
        let ordinal = described(&record).map_or(0, |device| device.ordinal);
        let device = Device::open(ordinal).map_err(|error| text(error.into()))?;
        Ok((device, record, Nvrtc::load().map_err(|error| text(error.into()))?))
    }

    /// Copy mechanisms of this architecture.
    fn copies(&self) -> Vec<CopyMechanism> {
        let all = [CopyMechanism::Plain, CopyMechanism::CpAsync, CopyMechanism::Bulk];
        // A record has the most advanced one of its architecture.
        all.into_iter().filter(|copy| *copy as u8 <= self.record.spec.copy as u8).collect()
    }
}

/// A folder with a cache, trials, and a manifest for the small trained model.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A workspace with its own cache, which looks into `shared` on a miss.
    fn workspace(&self, shared: Option<&Path>) -> Workspace {
        let places = Places {
            root: self.path("cache"),
            shared: shared.map(Path::to_path_buf),
            shared_read_only: false,
            key_file: None,
            remote: None,
        };
        Workspace {
            cache: Cache::open_places(&places, |_| {}).unwrap(),
            report: Report::quiet(),
            trials: self.path("trials.csv"),
        }
    }

    /// Writes `m.toml` for the small trained model, and the record with `copy` in place of its own.
    fn manifest(&self, record: &Target, copy: CopyMechanism, weights: &str, decode: &str) -> Manifest {
        let source = format!("path:{}", support::fixture("tinystories-llama").display());
        self.manifest_of(&source, record, copy, weights, decode)
    }

    /// The same for another model.
    fn manifest_of(&self, source: &str, record: &Target, copy: CopyMechanism, weights: &str, decode: &str) -> Manifest {
        let spec = Spec { copy, ..record.spec.clone() };
        let written = Target { name: format!("{}-{copy}", record.name), spec, ..record.clone() };
        let measured = TargetRecord::builtin(&record.name).map(|record| record.measured).unwrap_or_default();
        let record = TargetRecord { target: written, measured };
        std::fs::write(self.path("record.toml"), record.to_toml()).unwrap();
        let text = format!(
            "[model]\nsource = \"{source}\"\n[precision]\nweights = \"{weights}\"\n[decode]\n{decode}\n\
             [[target]]\nrecord = \"record.toml\"\n"
        );
        let path = self.path("m.toml");
        std::fs::write(&path, text).unwrap();
        Manifest::load(&path).unwrap_or_else(|error| panic!("{error}"))
    }
}

fn prepared(workspace: &Workspace, manifest: &Manifest) -> Prepared {
    prepare(workspace, manifest, &manifest.targets[0]).unwrap_or_else(|fault| panic!("{fault}"))
}

fn runner<'a>(workspace: &'a Workspace, prepared: &'a Prepared) -> Runner<'a> {
    prepared.runner(workspace).unwrap_or_else(|fault| panic!("{fault}"))
}

fn packed(prepared: &Prepared) -> Pack {
    let (schedule, imported) = (prepared.validated.schedule(), &prepared.imported);
    Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap())
}

/// The interpreter of the very schedule that the device runs, in f64.
fn interpreter(prepared: &Prepared) -> Interp {
    Interp::new(prepared.validated.schedule(), packed(prepared), Options::spec()).unwrap()
}

/// Every logit after every one of `ids`, `[ids][vocab]`.
fn logits(runner: &mut Runner<'_>, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = vec![];
    runner.logits(ids, &mut |_, row| rows.push(row.to_vec())).unwrap_or_else(|fault| panic!("{fault}"));
    rows
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|value| value.to_bits()).collect()
}

/// Norm of the difference divided by the norm of the expected values.
fn error_rel_l2(expected: &[f32], found: &[f32]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let square = |value: f64| value * value;
    let differences: f64 = expected.iter().zip(found).map(|(e, f)| square(f64::from(*e) - f64::from(*f))).sum();
    let norm: f64 = expected.iter().map(|e| square(f64::from(*e))).sum();
    (differences / norm).sqrt()
}
