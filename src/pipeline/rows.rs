//! Owns the rows that a build appends to the user's trials: what was tried, on what, and with which result.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::candidate::Candidate;
use crate::check::{CheckError, Figures};
use crate::codegen::emit::ENTRY_POINT;
use crate::codegen::waves;
use crate::cuda::session::SessionError;
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::trial::fresh_nonce;
use crate::flywheel::{
    CheckFigures, Cost, Decision, Facts, Machine, ModelShape, Origin, Point, Proposer, RatioInterval, Timing, Trial,
    Verdict, append,
};
use crate::format::name_of;
use crate::lower::format_of;
use crate::manifest::SearchKernel;
use crate::measure::{Measurement, Timed};
use crate::model::graph::{Layer, ModelGraph};
use crate::search::Space;

use super::chain::Chain;
use super::compile::Cubin;
use super::keys::{self, Hardware};
use super::made::MadeWave;
use super::stages::BuildContext;

/// What the rows of a trial have in common.
pub(super) struct TrialRow<'a> {
    /// The candidate, and what it became so far. Of a wave kernel: of the schedule from which its plan is derived.
    pub chain: &'a Chain<'a>,
    /// The wave kernel that was tried.
    pub wave: Option<WaveRow<'a>>,
    /// The device that ran it; `None` if it did not run.
    pub hardware: Option<&'a Hardware>,
    /// The worker that ran it, in a search on many machines.
    pub origin: Origin,
    /// The search that tried it.
    pub asked: Option<Asked>,
}

/// A candidate of a wave kernel.
#[derive(Clone, Copy)]
pub(super) struct WaveRow<'a> {
    pub candidate: &'a Candidate,
    /// `None`: it does not fit, or is not proven.
    pub made: Option<&'a MadeWave<'a>>,
}

/// What a search knows of a trial.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub campaign: Digest,
    /// `None` for a candidate that does not fit.
    pub trial: Option<u32>,
    pub seed: u64,
    pub proposer: Proposer,
    pub decision: Option<Decision>,
}

/// What a row has of its own: its verdict, and what belongs to one position.
pub(super) struct PositionVerdict {
    pub verdict: Verdict,
    /// Row of the candidate that it was timed against.
    pub incumbent: Option<Digest>,
    pub predicted_us: Option<f64>,
}

impl TrialRow<'_> {
    /// Appends one row for each verdict.
    pub fn append(&self, check_ms: Option<f64>, measure_ms: Option<f64>, verdicts: Vec<Verdict>) -> Result<(), Fault> {
        let alone = |verdict| PositionVerdict { verdict, incumbent: None, predicted_us: None };
        self.append_rows(check_ms, measure_ms, verdicts.into_iter().map(alone).collect()).map(|_| ())
    }

    /// As [`TrialRow::append`], with what only a search knows; the rows as they were written.
    pub fn append_rows(
        &self,
        check_ms: Option<f64>,
        measure_ms: Option<f64>,
        verdicts: Vec<PositionVerdict>,
    ) -> Result<Vec<Trial>, Fault> {
        let facts = self.facts(check_ms, measure_ms)?;
        let now = SystemTime::now();
        let trials = verdicts
            .into_iter()
            .map(|PositionVerdict { verdict, incumbent, predicted_us }| {
                let point = Point { incumbent, predicted_us, ..facts.point.clone() };
                Trial::new(Facts { point, ..facts.clone() }, verdict, now, fresh_nonce())
            })
            .collect::<Result<Vec<_>, _>>()?;
        append(&self.chain.context.workspace.trials, &trials)?;
        Ok(trials)
    }

    fn facts(&self, check_ms: Option<f64>, measure_ms: Option<f64>) -> Result<Facts, Fault> {
        let TrialRow { chain: Chain { context, candidate, .. }, wave, hardware, origin, asked } = self;
        let candidate = wave.map_or(candidate, |wave| wave.candidate);
        let Artefacts { schedule, source, cubin, smem_dynamic } = self.artefacts()?;
        let kernel = if asked.is_some() { context.searched() } else { SearchKernel::Decode };
        let text = candidate.to_string();
        let digest = Digest::of(text.as_bytes());
        // A device is named by its driver; the CPU that stands in for one is no device.
        let device = |of: fn(&Hardware) -> &String| {
            hardware.filter(|hardware| !hardware.uuid.is_empty()).map(of).cloned().unwrap_or_default()
        };
        let entry_point = if wave.is_some() { waves::ENTRY_POINT } else { ENTRY_POINT };
        let resources = cubin.and_then(|cubin| cubin.resources.kernels.get(entry_point));
        Ok(Facts {
            tool: keys::code_of_all(),
            host_kind: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            origin: origin.clone(),
            manifest: context.manifest.name.clone(),
            model_name: context.manifest.model_name(),
            model: shape(context, &context.imported.graph, kernel),
            machine: Machine {
                target: context.target.name.clone(),
                target_kind: context.target.kind.to_string(),
                devices: context.target.devices,
                device_name: device(|hardware| &hardware.name),
                device_uuid: device(|hardware| &hardware.uuid),
                driver: device(|hardware| &hardware.driver),
                nvrtc: cubin.map(|cubin| cubin.nvrtc.clone()).unwrap_or_default(),
                sm_count: if wave.is_some() { context.target.sms() } else { candidate.sms },
            },
            point: Point {
                context_max: context.manifest.decode.context_max,
                candidate: text,
                candidate_digest: digest,
                space: Space::digest(),
                schedule,
                source,
                cubin: cubin.map(|cubin| cubin.digest),
                campaign: asked.map(|asked| asked.campaign),
                trial: asked.and_then(|asked| asked.trial),
                seed: asked.map_or(context.manifest.search.seed, |asked| asked.seed),
                proposer: asked.map_or(Proposer::Default, |asked| asked.proposer),
                incumbent: None,
                decision: asked.and_then(|asked| asked.decision),
                predicted_us: None,
            },
            cost: Cost {
                compile_ms: cubin.and_then(|cubin| cubin.compile_ms),
                check_ms,
                measure_ms,
                registers: resources.map(|kernel| kernel.registers),
                spill_bytes: resources.map(|kernel| kernel.spill_store_bytes),
                smem_bytes: resources.map(|kernel| kernel.smem_static_bytes + smem_dynamic),
            },
        })
    }

    fn artefacts(&self) -> Result<Artefacts<'_>, Fault> {
        if let Some(WaveRow { made, .. }) = self.wave {
            return Ok(Artefacts {
                schedule: made.map(|made| made.plan),
                source: made.map(|made| made.source),
                cubin: made.map(|made| made.cubin.as_ref()),
                smem_dynamic: made.map_or(0, |made| made.smem_bytes),
            });
        }
        let (schedule, source, cubin) = self.chain.made();
        let smem_dynamic = match schedule {
            Some(schedule) => {
                let machine = &schedule.validated(self.chain.context.target)?.schedule().machine;
                machine.smem.iter().map(|part| part.offset + part.bytes).max().unwrap_or(0)
            }
            None => 0,
        };
        let (schedule, source) = (schedule.map(|schedule| schedule.content), source.map(|source| source.content));
        Ok(Artefacts { schedule, source, cubin, smem_dynamic })
    }
}

/// What became of a candidate.
struct Artefacts<'a> {
    schedule: Option<Digest>,
    source: Option<Digest>,
    cubin: Option<&'a Cubin>,
    /// Bytes of shared memory of a block.
    smem_dynamic: u32,
}

/// The columns of the model and of the kernel that ran.
pub(super) fn shape(context: &BuildContext<'_>, graph: &ModelGraph, kernel: SearchKernel) -> ModelShape {
    let precision = context.manifest.precision;
    let layer = graph.layers.first();
    // Experts of a layer are alike.
    let mlp = layer.and_then(|layer| layer.feed.mlps().next());
    let attention = graph.layers.iter().find_map(Layer::history);
    ModelShape {
        model_graph: context.graph,
        family: graph.family.clone(),
        layers: graph.layers.len() as u32,
        hidden: graph.hidden,
        intermediate: mlp.map_or(0, |mlp| mlp.up.rows),
        heads: attention.map_or(0, |attention| attention.heads),
        kv_heads: attention.map_or(0, |attention| attention.kv_heads),
        head_dim: attention.map_or(0, |attention| attention.head_dim),
        vocab: graph.vocab,
        parameters: graph.parameter_count(),
        weights_dtype: mlp.map_or(String::new(), |mlp| name_of(format_of(graph, &[&mlp.up], precision))),
        cache_dtype: precision.cache.to_string(),
        wire_dtype: precision.wire.to_string(),
        kernel: kernel.to_string(),
    }
}

/// How a candidate that ran went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Failure {
    /// Wrong numbers, or a time that cannot be true.
    Fail,
    Timeout,
    Crash,
}

impl Failure {
    pub fn of(error: &CheckError) -> Failure {
        match error {
            CheckError::Session(SessionError::Hung { .. } | SessionError::Lost) => Failure::Timeout,
            CheckError::Session(SessionError::Driver(driver)) if driver.is_crash() => Failure::Crash,
            _ => Failure::Fail,
        }
    }

    /// The verdict of a row.
    pub fn verdict(self, detail: String, figures: Option<Figures>) -> Verdict {
        let check = figures.map(check_figures);
        match self {
            Failure::Fail => Verdict::Fail { detail, check },
            Failure::Timeout => Verdict::Timeout { detail, check },
            Failure::Crash => Verdict::Crash { detail, check },
        }
    }
}

pub(super) fn check_figures(figures: Figures) -> CheckFigures {
    let Figures { positions, error_abs_max, error_rel_l2, kl_max, argmax_agree, .. } = figures;
    CheckFigures { positions, error_abs_max, error_rel_l2, kl_max, argmax_agree }
}

/// One verdict a position: `ok` with its time, or `fail` where the time cannot be true.
pub(super) fn verdicts(figures: Figures, measurement: &Measurement) -> Vec<Verdict> {
    let check = check_figures(figures);
    let timed = measurement.timed().iter().map(|timed| Verdict::Ok { check, timing: timing(timed, None) });
    let withheld = measurement
        .withheld()
        .iter()
        .map(|withheld| Verdict::Fail { detail: withheld.reason.clone(), check: Some(check) });
    timed.chain(withheld).collect()
}

pub(super) fn timing(timed: &Timed, ratio: Option<RatioInterval>) -> Timing {
    let Timed {
        position,
        steps_per_launch,
        samples,
        latency_us_p10,
        latency_us_p50,
        latency_us_p90,
        bytes_per_step,
        floor_us,
        clock_sm_mhz,
        clock_mem_mhz,
        throttle,
    } = timed.clone();
    Timing {
        position,
        steps_per_launch,
        samples,
        latency_us_p10,
        latency_us_p50,
        latency_us_p90,
        ratio,
        ratio_vs_default: None,
        bytes_per_step,
        floor_us,
        clock_sm_mhz,
        clock_mem_mhz,
        throttle,
    }
}
