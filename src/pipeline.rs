//! Owns the order of the stages: what a build runs, what it finds in the cache, and what waits for a device.

use crate::cache::Cache;
use crate::candidate::Candidate;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::model::config::Imported;
use crate::report::Report;
use crate::sample::SampleSettings;
use crate::target::Target;
use crate::validate::Validated;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// What every command works with.
pub struct Workspace {
    pub cache: Cache,
    pub report: Report,
    /// The user's own trials.
    pub trials: PathBuf,
}

/// A manifest's model on one target, up to the proof (and, for a CUDA target with NVRTC, the cubin).
pub struct Prepared {
    pub manifest: Manifest,
    pub target: Target,
    pub imported: Imported,
    pub candidate: Candidate,
    pub validated: Validated,
}

/// Imports, lowers, schedules and proves; every stage through the cache.
pub fn prepare(_workspace: &Workspace, _manifest: &Manifest, _target: &Target) -> Result<Prepared, Fault> {
    Err(Fault::internal("not written yet"))
}

/// What a build did, for the last line and for `--json`.
#[derive(Debug, Clone, PartialEq)]
pub struct BuildReport {
    pub ran: usize,
    pub cached: usize,
    /// One line a target that waits for a device or a tool.
    pub waiting: Vec<String>,
}

/// Runs every stage of every target of the manifest that this machine can run.
pub fn build(_workspace: &Workspace, _manifest: &Manifest) -> Result<BuildReport, Fault> {
    Err(Fault::internal("not written yet"))
}

/// Executes a prepared model: the interpreter for `cpu`, the kernel for a CUDA target whose device is here.
pub struct Runner {}

impl Prepared {
    pub fn runner(&self, _workspace: &Workspace) -> Result<Runner, Fault> {
        Err(Fault::internal("not written yet"))
    }
}

impl Runner {
    /// Logits after each of `ids` from position 0, whatever the model would have chosen: `on_row(position, logits)`.
    pub fn logits(&mut self, _ids: &[u32], _on_row: &mut dyn FnMut(u32, &[f32])) -> Result<(), Fault> {
        Err(Fault::internal("not written yet"))
    }

    /// Continues `prompt` with at most `max_tokens` tokens; stops behind the first of `eos`. `on_token` sees each token as
    /// soon as it is decided.
    pub fn generate(
        &mut self,
        _prompt: &[u32],
        _max_tokens: usize,
        _eos: &[u32],
        _sampling: &SampleSettings,
        _on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, Fault> {
        Err(Fault::internal("not written yet"))
    }

    /// Where it runs, for the user: `cpu interpreter on 2 threads`, `NVIDIA H200 (device 0)`.
    pub fn place(&self) -> String {
        String::new()
    }
}

/// What a build would do about one stage of one target.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    pub target: String,
    pub stage: String,
    pub cached: bool,
    /// Inputs that changed since the last build, as lines of the key text.
    pub lines: Vec<String>,
}

/// Which stages a build would run, and why; runs nothing.
pub fn explain(_workspace: &Workspace, _manifest: &Manifest) -> Result<Vec<Explained>, Fault> {
    Err(Fault::internal("not written yet"))
}

/// What one stage of one target makes, as text.
pub fn show(_workspace: &Workspace, _manifest: &Manifest, _target: &Target, _stage: &str) -> Result<String, Fault> {
    Err(Fault::internal("not written yet"))
}
