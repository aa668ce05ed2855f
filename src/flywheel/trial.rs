//! Owns `Trial`: one row of the corpus, its columns and their units.
//!
//! Only [`Verdict::Ok`] holds a [`Timing`], so a row with an unchecked latency cannot be built, and predicted
//! and measured figures are fields of different structs. One timed position is one row: a candidate timed at three
//! positions gives three rows that share everything but their [`Timing`].

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::digest::{Digest, KeyPart, KeySink, key};
use crate::error::Fault;

/// Version of the columns, in every row. A row with a larger one is refused, not guessed at; older ones are read.
pub const SCHEMA: u32 = 4;
/// Columns of schema 2: the decisions of a search. In older rows they are empty or absent.
pub const ADDED_IN_2: [&str; 3] = ["campaign", "trial", "decision"];
/// Columns of schema 3, for people who group rows. Only the ratio cannot be derived from other columns, so they may be missing from
/// the header of an older file to which newer rows are appended.
pub const ADDED_IN_3: [&str; 3] = ["model", "op", "ratio_vs_default"];
/// Columns of schema 4: the kernel that ran, where a search on many machines ran a trial, and how many devices ran the model together. A row without them is
/// of the decode kernel, and of as many devices as the name of its target says. No row of another kernel is appended to a file without the first.
pub const ADDED_IN_4: [&str; 5] = ["kernel", "host", "engine", "job", "devices"];
/// What ran in rows of older schemas.
pub const DECODE_KERNEL: &str = "decode";
/// Longest text of a cell; a candidate of 60 knobs takes about 1000 bytes.
const TEXT_BYTES_MAX: usize = 8192;
/// Digits of a digest that was shortened: 64 bits.
const SHORT_DIGITS: usize = 16;
/// Longest text of a reason; the rest is cut, because the row names artefacts that say more.
const DETAIL_CHARS_MAX: usize = 500;

/// One column, as the documentation shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    pub name: &'static str,
    /// `digest`, `text`, `count`, or the unit of a number.
    pub unit: &'static str,
    pub meaning: &'static str,
}

const fn column(name: &'static str, unit: &'static str, meaning: &'static str) -> Column {
    Column { name, unit, meaning }
}

/// All columns in file order. Digests are 64 hex digits of blake3. Cells are empty where nothing was measured.
pub const COLUMNS: [Column; 75] = [
    column("schema", "count", "version of these columns"),
    column("trial_id", "digest", "names the row: digest of its other columns and a nonce"),
    column("utc", "time", "when the row was made, `2026-01-31T12:00:00Z`"),
    column("tool", "digest", "the code of the stages and the search"),
    column("host_kind", "text", "what the host is, such as `x86_64-linux`"),
    column("host", "text", "name of the host, in a search on many machines"),
    column("engine", "text", "what started its worker, such as `slurm` or `ray`"),
    column("job", "text", "what that engine calls the worker"),
    column("manifest", "text", "name of the manifest"),
    column("model", "text", "what the weights or shapes are called: the last part of the manifest's source"),
    column("op", "text", "the op that ran alone; empty for whole steps"),
    column(
        "kernel",
        "text",
        "the kernel that ran, as `[search]` names it: `decode`, `wave:32`, `chunk`; empty in rows of older schemas, which are of `decode`",
    ),
    column("model_graph", "digest", "the imported model, without the values of the weights"),
    column(
        "family",
        "text",
        "class of the checkpoint, such as `LlamaForCausalLM`; of an op alone `LlamaForCausalLM:down`",
    ),
    column("layers", "count", "decoder layers"),
    column("hidden", "count", "width of the residual"),
    column("intermediate", "count", "width of the MLP"),
    column("heads", "count", "query heads"),
    column("kv_heads", "count", "key and value heads"),
    column("head_dim", "count", "width of one head"),
    column("vocab", "count", "rows of the output matrix"),
    column("parameters", "count", "weights of the checkpoint, tied ones once"),
    column("weights_dtype", "text", "type of streamed weights"),
    column("cache_dtype", "text", "type of cached keys and values"),
    column("wire_dtype", "text", "type of activations between SMs"),
    column("target", "text", "name of the target record; with several devices also their number: `h200-x2`"),
    column("target_kind", "text", "`cuda` or `cpu`"),
    column("devices", "count", "devices that ran the model together; empty in rows of older schemas: see `target`"),
    column("device_name", "text", "as the driver reports it; empty if no device took part"),
    column("device_uuid", "text", "as the driver reports it; of several devices all, with `+` between them"),
    column("driver", "text", "driver version"),
    column("nvrtc", "text", "compiler version"),
    column("sm_count", "count", "SMs that take part, of all devices (worker threads on `cpu`)"),
    column("context_max", "positions", "positions the kernel was built for"),
    column("candidate", "text", "the knobs, `name=value;name=value`"),
    column("candidate_digest", "digest", "the same as one word"),
    column("space", "digest", "the knobs and values that the search could choose from"),
    column("schedule", "digest", "the placed program; empty if there is none"),
    column("source", "digest", "the generated kernel source; empty if there is none"),
    column("cubin", "digest", "the compiled kernel; empty if there is none"),
    column("campaign", "digest", "the search that tried it; empty for a build without one"),
    column("trial", "count", "its number in the campaign, 0 for the default candidate; the same at every position"),
    column("seed", "count", "seed of the search"),
    column(
        "proposer",
        "text",
        "who proposed the candidate: `default`, `prior`, `explore`, `local` or `external`; `seed` is accepted, and no search writes it",
    ),
    column("incumbent", "digest", "trial_id of the row it was timed against in the same process; may be empty"),
    column(
        "decision",
        "text",
        "`first`, `faster`, `simpler` (kept) or `reverted`, over all positions; empty if nothing was decided",
    ),
    column("verdict", "text", "`ok`, `fail`, `infeasible`, `rejected`, `timeout` or `crash`"),
    column("verdict_detail", "text", "why, if not `ok`"),
    column("check_positions", "count", "positions whose logits were compared with the reference"),
    column("error_abs_max", "logits", "largest absolute difference; may be `inf` or `NaN`"),
    column(
        "error_rel_l2",
        "ratio",
        "norm of the difference divided by norm of the reference, largest of all positions",
    ),
    column("kl_max", "nats", "largest divergence from the reference's distribution"),
    column("argmax_agree", "count", "positions whose most likely token agrees"),
    column("position", "positions", "tokens in the cache at the first timed step; of `chunk` the tokens of the prompt"),
    column("steps_per_launch", "count", "steps in one launch; of `chunk` 1, the whole prompt"),
    column("samples", "count", "timed launches"),
    column("latency_us_p10", "µs per step", "10th percentile over launches"),
    column("latency_us_p50", "µs per step", "median over launches"),
    column("latency_us_p90", "µs per step", "90th percentile over launches"),
    column(
        "ratio_vs_incumbent_p50",
        "ratio",
        "median of paired latencies, this row's divided by the incumbent's; below 1 is faster",
    ),
    column("ratio_low", "ratio", "lower end of its bootstrap interval"),
    column("ratio_high", "ratio", "upper end"),
    column(
        "ratio_vs_default",
        "ratio",
        "latency divided by the default's: ratios chained through `incumbent`, 1 for the default; empty outside of searches",
    ),
    column("bytes_per_step", "bytes", "bytes a step has to move at that position"),
    column(
        "floor_us",
        "µs per step",
        "time for those bytes at the target's bandwidth; empty if the bandwidth is unknown",
    ),
    column("clock_sm_mhz", "MHz", "SM clock while timing"),
    column("clock_mem_mhz", "MHz", "memory clock while timing"),
    column(
        "throttle",
        "text",
        "reasons for throttling while timing; `none` if there were none; empty if they were not read",
    ),
    column("predicted_us", "µs per step", "the cost model's prediction before the run; never a measurement"),
    column("compile_ms", "ms", "source to cubin; empty if it was cached or not reached"),
    column("check_ms", "ms", "comparison with the reference"),
    column("measure_ms", "ms", "timing, warm-up included"),
    column("registers", "count", "registers of a thread"),
    column("spill_bytes", "bytes", "local memory of a thread"),
    column("smem_bytes", "bytes", "shared memory of a block, static and dynamic"),
];

/// What was tried, and on what. The same for all positions at which one candidate is timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Digest of the code of the stages and the search.
    pub tool: Digest,
    pub host_kind: String,
    pub origin: Origin,
    pub manifest: String,
    /// Name of the weights or the shapes; empty in rows of older schemas.
    pub model_name: String,
    pub model: ModelShape,
    pub machine: Machine,
    pub point: Point,
    pub cost: Cost,
}

/// Shape columns, so that a prior can carry over from one model to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    pub model_graph: Digest,
    pub family: String,
    pub layers: u32,
    pub hidden: u32,
    pub intermediate: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub vocab: u32,
    pub parameters: u64,
    pub weights_dtype: String,
    pub cache_dtype: String,
    pub wire_dtype: String,
    /// The kernel that ran, as `[search]` of a manifest names it.
    pub kernel: String,
}

impl ModelShape {
    /// The op that ran alone; `None` for whole steps.
    pub fn op(&self) -> Option<&str> {
        self.family.split_once(':').map(|(_, op)| op)
    }
}

impl Facts {
    /// Name of what ran, for people: the manifest's name, after a colon the op that ran alone, and a kernel that is not the decode kernel.
    pub fn name(&self) -> String {
        let name = self.model.op().map_or(self.manifest.clone(), |op| format!("{}:{op}", self.manifest));
        if self.model.kernel == DECODE_KERNEL { name } else { format!("{name} {}", self.model.kernel) }
    }
}

/// The worker that ran it in a search on many machines; empty for all else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    pub host: String,
    pub engine: String,
    pub job: String,
}

/// Where it ran. Fields of a device are empty if none took part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub target: String,
    pub target_kind: String,
    /// Devices that ran the model together.
    pub devices: u32,
    pub device_name: String,
    pub device_uuid: String,
    pub driver: String,
    pub nvrtc: String,
    pub sm_count: u32,
}

/// The point of the search space, and the artefacts that were built from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    pub context_max: u32,
    /// One line, `name=value;name=value`.
    pub candidate: String,
    pub candidate_digest: Digest,
    pub space: Digest,
    pub schedule: Option<Digest>,
    pub source: Option<Digest>,
    pub cubin: Option<Digest>,
    /// The search that tried it, and its number there; `None` for a build without a search.
    pub campaign: Option<Digest>,
    pub trial: Option<u32>,
    pub seed: u64,
    pub proposer: Proposer,
    /// Id of the trial that it was timed against.
    pub incumbent: Option<Digest>,
    /// The decision of the search.
    pub decision: Option<Decision>,
    /// The cost model's prediction, made before anything ran.
    pub predicted_us: Option<f64>,
}

/// Who proposed the candidate. No search writes `Seed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proposer {
    Default,
    Prior,
    Explore,
    Local,
    External,
    Seed,
}

impl Proposer {
    pub const ALL: [Proposer; 6] =
        [Proposer::Default, Proposer::Prior, Proposer::Explore, Proposer::Local, Proposer::External, Proposer::Seed];

    pub fn name(self) -> &'static str {
        match self {
            Proposer::Default => "default",
            Proposer::Prior => "prior",
            Proposer::Explore => "explore",
            Proposer::Local => "local",
            Proposer::External => "external",
            Proposer::Seed => "seed",
        }
    }
}

impl Display for Proposer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The decision of a search about a candidate that was checked and timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Decision {
    /// The first of a campaign: there is nothing to compare it with.
    First,
    /// Faster than the incumbent by the margin, and the interval says so.
    Faster,
    /// As fast within the margin, and fewer knobs away from the default.
    Simpler,
    Reverted,
}

impl Decision {
    pub const ALL: [Decision; 4] = [Decision::First, Decision::Faster, Decision::Simpler, Decision::Reverted];

    pub fn name(self) -> &'static str {
        match self {
            Decision::First => "first",
            Decision::Faster => "faster",
            Decision::Simpler => "simpler",
            Decision::Reverted => "reverted",
        }
    }

    /// Whether the candidate is the incumbent from now on.
    pub fn is_kept(self) -> bool {
        self != Decision::Reverted
    }
}

impl Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Costs. Empty if a step was cached or not reached.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cost {
    pub compile_ms: Option<f64>,
    pub check_ms: Option<f64>,
    pub measure_ms: Option<f64>,
    /// Per thread.
    pub registers: Option<u32>,
    /// Per thread.
    pub spill_bytes: Option<u32>,
    /// Per block, static and dynamic.
    pub smem_bytes: Option<u32>,
}

/// Result of a trial.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Checked against the reference, and timed.
    Ok { check: CheckFigures, timing: Timing },
    /// The numbers are wrong, or the timing cannot be true.
    Fail { detail: String, check: Option<CheckFigures> },
    /// The candidate does not fit the target.
    Infeasible { detail: String },
    /// The validator found a violation.
    Rejected { detail: String },
    /// Past its deadline.
    Timeout { detail: String, check: Option<CheckFigures> },
    /// Its process or its device context died.
    Crash { detail: String, check: Option<CheckFigures> },
}

impl Verdict {
    /// The words of the `verdict` column.
    pub const NAMES: [&'static str; 6] = ["ok", "fail", "infeasible", "rejected", "timeout", "crash"];

    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Ok { .. } => "ok",
            Verdict::Fail { .. } => "fail",
            Verdict::Infeasible { .. } => "infeasible",
            Verdict::Rejected { .. } => "rejected",
            Verdict::Timeout { .. } => "timeout",
            Verdict::Crash { .. } => "crash",
        }
    }

    /// Why, if not `ok`.
    pub fn detail(&self) -> &str {
        match self {
            Verdict::Ok { .. } => "",
            Verdict::Fail { detail, .. }
            | Verdict::Infeasible { detail }
            | Verdict::Rejected { detail }
            | Verdict::Timeout { detail, .. }
            | Verdict::Crash { detail, .. } => detail,
        }
    }

    pub fn check(&self) -> Option<&CheckFigures> {
        match self {
            Verdict::Ok { check, .. } => Some(check),
            Verdict::Fail { check, .. } | Verdict::Timeout { check, .. } | Verdict::Crash { check, .. } => {
                check.as_ref()
            }
            Verdict::Infeasible { .. } | Verdict::Rejected { .. } => None,
        }
    }

    pub fn timing(&self) -> Option<&Timing> {
        match self {
            Verdict::Ok { timing, .. } => Some(timing),
            _ => None,
        }
    }

    /// Whether its figures can be those of a row.
    ///
    /// # Errors
    /// The first that cannot.
    pub fn is_sound(&self) -> Result<(), RowFault> {
        if let Some(check) = self.check() {
            check.check()?;
        }
        match self {
            Verdict::Ok { timing, .. } => timing.check(),
            _ if self.detail().trim().is_empty() => fault("verdict_detail", "expected a reason, found nothing"),
            _ => Ok(()),
        }
    }
}

/// Numerics against the reference. A kernel that fails may produce infinities and NaN, and they are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckFigures {
    pub positions: u32,
    pub error_abs_max: f64,
    pub error_rel_l2: f64,
    pub kl_max: f64,
    /// Positions whose arg-max agrees.
    pub argmax_agree: u32,
}

/// Timing at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// Tokens in the cache at the first timed step.
    pub position: u32,
    pub steps_per_launch: u32,
    /// Timed launches.
    pub samples: u32,
    pub latency_us_p10: f64,
    pub latency_us_p50: f64,
    pub latency_us_p90: f64,
    pub ratio: Option<RatioInterval>,
    /// Latency divided by the default's, chained; `None` outside of searches and in rows of older schemas.
    pub ratio_vs_default: Option<f64>,
    pub bytes_per_step: u64,
    pub floor_us: Option<f64>,
    pub clock_sm_mhz: Option<u32>,
    pub clock_mem_mhz: Option<u32>,
    /// Reasons for throttling while timing; `none` if there were none, empty if they were not read.
    pub throttle: String,
}

/// Paired latency of this trial divided by the incumbent's, with its bootstrap interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RatioInterval {
    pub p50: f64,
    pub low: f64,
    pub high: f64,
}

impl RatioInterval {
    /// The ratio of a candidate to itself.
    pub const ONE: RatioInterval = RatioInterval { p50: 1.0, low: 1.0, high: 1.0 };

    /// The ratio with both sides exchanged.
    pub fn inverse(self) -> RatioInterval {
        RatioInterval { p50: 1.0 / self.p50, low: 1.0 / self.high, high: 1.0 / self.low }
    }

    /// Geometric means of medians and bounds; `None` for an empty list. The true bounds of the mean lie within these means of bounds.
    pub fn mean(all: &[RatioInterval]) -> Option<RatioInterval> {
        let count = all.len() as f64;
        let mean = |of: fn(&RatioInterval) -> f64| (all.iter().map(|ratio| of(ratio).ln()).sum::<f64>() / count).exp();
        (!all.is_empty()).then(|| match all {
            // Not through a logarithm and back, by which 1 might become another number.
            [one] => *one,
            _ => RatioInterval { p50: mean(|r| r.p50), low: mean(|r| r.low), high: mean(|r| r.high) },
        })
    }
}

/// An impossible row: built by us, or found in a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column `{column}`: {reason}")]
pub struct RowFault {
    pub column: &'static str,
    pub reason: String,
}

impl From<RowFault> for Fault {
    /// Only a row that we built becomes an error; bad rows in files are reported and skipped.
    fn from(fault: RowFault) -> Fault {
        Fault::internal(format!("a trial cannot be written: {fault}"))
    }
}

fn fault<T>(column: &'static str, reason: impl Into<String>) -> Result<T, RowFault> {
    Err(RowFault { column, reason: reason.into() })
}

/// One row. Sound by construction: it has a latency if and only if the verdict is `ok`, and that latency is plausible.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    trial_id: Digest,
    utc: String,
    facts: Facts,
    verdict: Verdict,
}

impl Trial {
    /// Makes a row. `nonce` distinguishes repetitions within one second: [`fresh_nonce`].
    pub fn new(facts: Facts, verdict: Verdict, now: SystemTime, nonce: u64) -> Result<Trial, RowFault> {
        let mut trial = Trial { trial_id: Digest::from_bytes([0; 32]), utc: utc_text(now), facts, verdict };
        for (name, cell) in trial.cells() {
            if cell.len() > TEXT_BYTES_MAX {
                return fault(name, format!("expected at most {TEXT_BYTES_MAX} bytes, found {}", cell.len()));
            }
        }
        trial.check()?;
        trial.trial_id = key(&Identity { trial: &trial, nonce }).0;
        Ok(trial)
    }

    /// The row for a corpus that is shared. The device has a number in place of its UUID, the host has no name, and the ratio to the default is filled in.
    /// Figures that no search reads have six digits, digests that only identify have sixteen, and digests that are never read are
    /// left out.
    pub fn cells_to_share(
        &self,
        device: &str,
        model: &str,
        ratio_vs_default: Option<f64>,
    ) -> Vec<(&'static str, String)> {
        let mut cells = self.cells();
        for (name, cell) in &mut cells {
            match *name {
                "device_uuid" => *cell = device.to_string(),
                "host" | "job" => cell.clear(),
                "model" => *cell = model.to_string(),
                "ratio_vs_default" => *cell = optional(ratio_vs_default.map(six_digits)),
                "candidate_digest" | "source" | "cubin" => cell.clear(),
                "trial_id" | "incumbent" | "schedule" => cell.truncate(SHORT_DIGITS),
                // The prior and the ranking read these two, to the last bit.
                "ratio_vs_incumbent_p50" | "predicted_us" => {}
                "ratio_low" | "ratio_high" | "floor_us" | "compile_ms" | "check_ms" | "measure_ms"
                | "error_abs_max" | "error_rel_l2" | "kl_max" | "latency_us_p10" | "latency_us_p50"
                | "latency_us_p90" => {
                    if let Ok(value) = cell.parse::<f64>() {
                        *cell = six_digits(value).to_string();
                    }
                }
                _ => {}
            }
        }
        cells
    }

    pub fn trial_id(&self) -> Digest {
        self.trial_id
    }

    pub fn utc(&self) -> &str {
        &self.utc
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// The rules for every row, built or read.
    fn check(&self) -> Result<(), RowFault> {
        if !is_utc(&self.utc) {
            return fault("utc", format!("expected `2026-01-31T12:00:00Z`, found `{}`", cut(&self.utc)));
        }
        let Point { predicted_us, .. } = &self.facts.point;
        let Cost { compile_ms, check_ms, measure_ms, .. } = &self.facts.cost;
        for (name, value) in [
            ("predicted_us", predicted_us),
            ("compile_ms", compile_ms),
            ("check_ms", check_ms),
            ("measure_ms", measure_ms),
        ] {
            if value.is_some_and(|value| !value.is_finite() || value < 0.0) {
                return fault(name, format!("expected a number from 0 on, found `{}`", optional(*value)));
            }
        }
        self.verdict.is_sound()?;
        if self.facts.point.decision.is_some_and(Decision::is_kept) && self.verdict.timing().is_none() {
            return fault("decision", format!("a candidate with the verdict `{}` is never kept", self.verdict.name()));
        }
        if self.verdict.timing().is_some() && self.facts.point.schedule.is_none() {
            return fault("schedule", "expected the digest of what was timed, found nothing");
        }
        Ok(())
    }

    /// The row as text, in the order of [`COLUMNS`]. No cell has a line break or another control character.
    pub fn cells(&self) -> Vec<(&'static str, String)> {
        // Destructured, so that a new field does not compile until it has a column.
        let Trial { trial_id, utc, facts, verdict } = self;
        let Facts { tool, host_kind, origin, manifest, model_name, model, machine, point, cost } = facts;
        let Origin { host, engine, job } = origin;
        let ModelShape {
            model_graph,
            family,
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            vocab,
            parameters,
            weights_dtype,
            cache_dtype,
            wire_dtype,
            kernel,
        } = model;
        let Machine { target, target_kind, devices, device_name, device_uuid, driver, nvrtc, sm_count } = machine;
        let Point {
            context_max,
            candidate,
            candidate_digest,
            space,
            schedule,
            source,
            cubin,
            campaign,
            trial,
            seed,
            proposer,
            incumbent,
            decision,
            predicted_us,
        } = point;
        let Cost { compile_ms, check_ms, measure_ms, registers, spill_bytes, smem_bytes } = cost;
        let check = verdict.check();
        let timing = verdict.timing();
        let ratio = timing.and_then(|timing| timing.ratio);
        let detail: String = verdict.detail().chars().take(DETAIL_CHARS_MAX).collect();
        vec![
            ("schema", SCHEMA.to_string()),
            ("trial_id", trial_id.to_string()),
            ("utc", line(utc)),
            ("tool", tool.to_string()),
            ("host_kind", line(host_kind)),
            ("host", line(host)),
            ("engine", line(engine)),
            ("job", line(job)),
            ("manifest", line(manifest)),
            ("model", line(model_name)),
            ("op", line(model.op().unwrap_or_default())),
            ("kernel", line(kernel)),
            ("model_graph", model_graph.to_string()),
            ("family", line(family)),
            ("layers", layers.to_string()),
            ("hidden", hidden.to_string()),
            ("intermediate", intermediate.to_string()),
            ("heads", heads.to_string()),
            ("kv_heads", kv_heads.to_string()),
            ("head_dim", head_dim.to_string()),
            ("vocab", vocab.to_string()),
            ("parameters", parameters.to_string()),
            ("weights_dtype", line(weights_dtype)),
            ("cache_dtype", line(cache_dtype)),
            ("wire_dtype", line(wire_dtype)),
            ("target", line(target)),
            ("target_kind", line(target_kind)),
            ("devices", devices.to_string()),
            ("device_name", line(device_name)),
            ("device_uuid", line(device_uuid)),
            ("driver", line(driver)),
            ("nvrtc", line(nvrtc)),
            ("sm_count", sm_count.to_string()),
            ("context_max", context_max.to_string()),
            ("candidate", line(candidate)),
            ("candidate_digest", candidate_digest.to_string()),
            ("space", space.to_string()),
            ("schedule", optional(*schedule)),
            ("source", optional(*source)),
            ("cubin", optional(*cubin)),
            ("campaign", optional(*campaign)),
            ("trial", optional(*trial)),
            ("seed", seed.to_string()),
            ("proposer", proposer.to_string()),
            ("incumbent", optional(*incumbent)),
            ("decision", optional(*decision)),
            ("verdict", verdict.name().to_string()),
            ("verdict_detail", line(&detail)),
            ("check_positions", optional(check.map(|check| check.positions))),
            ("error_abs_max", optional(check.map(|check| check.error_abs_max))),
            ("error_rel_l2", optional(check.map(|check| check.error_rel_l2))),
            ("kl_max", optional(check.map(|check| check.kl_max))),
            ("argmax_agree", optional(check.map(|check| check.argmax_agree))),
            ("position", optional(timing.map(|timing| timing.position))),
            ("steps_per_launch", optional(timing.map(|timing| timing.steps_per_launch))),
            ("samples", optional(timing.map(|timing| timing.samples))),
            ("latency_us_p10", optional(timing.map(|timing| timing.latency_us_p10))),
            ("latency_us_p50", optional(timing.map(|timing| timing.latency_us_p50))),
            ("latency_us_p90", optional(timing.map(|timing| timing.latency_us_p90))),
            ("ratio_vs_incumbent_p50", optional(ratio.map(|ratio| ratio.p50))),
            ("ratio_low", optional(ratio.map(|ratio| ratio.low))),
            ("ratio_high", optional(ratio.map(|ratio| ratio.high))),
            ("ratio_vs_default", optional(timing.and_then(|timing| timing.ratio_vs_default))),
            ("bytes_per_step", optional(timing.map(|timing| timing.bytes_per_step))),
            ("floor_us", optional(timing.and_then(|timing| timing.floor_us))),
            ("clock_sm_mhz", optional(timing.and_then(|timing| timing.clock_sm_mhz))),
            ("clock_mem_mhz", optional(timing.and_then(|timing| timing.clock_mem_mhz))),
            ("throttle", timing.map(|timing| line(&timing.throttle)).unwrap_or_default()),
            ("predicted_us", optional(*predicted_us)),
            ("compile_ms", optional(*compile_ms)),
            ("check_ms", optional(*check_ms)),
            ("measure_ms", optional(*measure_ms)),
            ("registers", optional(*registers)),
            ("spill_bytes", optional(*spill_bytes)),
            ("smem_bytes", optional(*smem_bytes)),
        ]
    }

    /// Reads a row of this schema or an older one. `columns` says where in `cells` each column is; every column of
    /// [`COLUMNS`] that the row's schema has must be there.
    pub(super) fn from_cells(columns: &HashMap<String, usize>, cells: &[&str]) -> Result<Trial, RowFault> {
        let row = Row { columns, cells };
        let schema: u32 = row.number("schema")?;
        if !(1..=SCHEMA).contains(&schema) {
            return fault("schema", format!("expected 1 to {SCHEMA}, found {schema}"));
        }
        let model = ModelShape {
            model_graph: row.digest("model_graph")?,
            family: row.text("family")?,
            layers: row.number("layers")?,
            hidden: row.number("hidden")?,
            intermediate: row.number("intermediate")?,
            heads: row.number("heads")?,
            kv_heads: row.number("kv_heads")?,
            head_dim: row.number("head_dim")?,
            vocab: row.number("vocab")?,
            parameters: row.number("parameters")?,
            weights_dtype: row.text("weights_dtype")?,
            cache_dtype: row.text("cache_dtype")?,
            wire_dtype: row.text("wire_dtype")?,
            kernel: row.kernel()?,
        };
        let machine = Machine {
            target: row.text("target")?,
            target_kind: row.text("target_kind")?,
            devices: row.devices()?,
            device_name: row.text("device_name")?,
            device_uuid: row.text("device_uuid")?,
            driver: row.text("driver")?,
            nvrtc: row.text("nvrtc")?,
            sm_count: row.number("sm_count")?,
        };
        let proposer = row.text("proposer")?;
        let Some(proposer) = Proposer::ALL.into_iter().find(|known| known.name() == proposer) else {
            let known = Proposer::ALL.map(Proposer::name).join(", ");
            return fault("proposer", format!("expected one of {known}, found `{}`", cut(&proposer)));
        };
        let decision = match row.cell("decision")? {
            "" => None,
            word => match Decision::ALL.into_iter().find(|known| known.name() == word) {
                Some(decision) => Some(decision),
                None => {
                    let known = Decision::ALL.map(Decision::name).join(", ");
                    return fault("decision", format!("expected one of {known} or nothing, found `{}`", cut(word)));
                }
            },
        };
        let point = Point {
            context_max: row.number("context_max")?,
            candidate: row.text("candidate")?,
            candidate_digest: match row.digest_or_empty("candidate_digest")? {
                Some(digest) => digest,
                None => Digest::of(row.cell("candidate")?.as_bytes()),
            },
            space: row.digest("space")?,
            schedule: row.digest_or_empty("schedule")?,
            source: row.digest_or_empty("source")?,
            cubin: row.digest_or_empty("cubin")?,
            campaign: row.digest_or_empty("campaign")?,
            trial: row.number_or_empty("trial")?,
            seed: row.number("seed")?,
            proposer,
            incumbent: row.digest_or_empty("incumbent")?,
            decision,
            predicted_us: row.number_or_empty("predicted_us")?,
        };
        let cost = Cost {
            compile_ms: row.number_or_empty("compile_ms")?,
            check_ms: row.number_or_empty("check_ms")?,
            measure_ms: row.number_or_empty("measure_ms")?,
            registers: row.number_or_empty("registers")?,
            spill_bytes: row.number_or_empty("spill_bytes")?,
            smem_bytes: row.number_or_empty("smem_bytes")?,
        };
        let facts = Facts {
            tool: row.digest("tool")?,
            host_kind: row.text("host_kind")?,
            origin: Origin { host: row.text("host")?, engine: row.text("engine")?, job: row.text("job")? },
            manifest: row.text("manifest")?,
            model_name: row.text("model")?,
            model,
            machine,
            point,
            cost,
        };
        let (trial_id, utc) = (row.digest("trial_id")?, row.text("utc")?);
        let trial = Trial { trial_id, utc, facts, verdict: row.verdict()? };
        trial.check()?;
        Ok(trial)
    }
}

/// The content of which a trial's id is the digest.
struct Identity<'a> {
    trial: &'a Trial,
    nonce: u64,
}

impl KeyPart for Identity<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { trial, nonce } = self;
        for (name, cell) in trial.cells().iter().filter(|(name, _)| *name != "trial_id") {
            key.text(name, cell);
        }
        key.value("nonce", nonce);
    }
}

impl CheckFigures {
    fn check(&self) -> Result<(), RowFault> {
        for (name, value) in
            [("error_abs_max", self.error_abs_max), ("error_rel_l2", self.error_rel_l2), ("kl_max", self.kl_max)]
        {
            // A divergence is not negative, but its sum in floating point may be, by rounding.
            let least = if name == "kl_max" { -1e-3 } else { 0.0 };
            if value < least {
                return fault(name, format!("expected a number from 0 on, found `{value}`"));
            }
        }
        if self.positions == 0 {
            return fault("check_positions", "expected at least 1, found 0");
        }
        if self.argmax_agree > self.positions {
            return fault("argmax_agree", format!("expected at most {}, found {}", self.positions, self.argmax_agree));
        }
        Ok(())
    }
}

impl Timing {
    fn check(&self) -> Result<(), RowFault> {
        let Timing { latency_us_p10: p10, latency_us_p50: p50, latency_us_p90: p90, .. } = *self;
        for (name, value) in [
            ("latency_us_p10", Some(p10)),
            ("latency_us_p50", Some(p50)),
            ("latency_us_p90", Some(p90)),
            ("floor_us", self.floor_us),
            ("ratio_vs_incumbent_p50", self.ratio.map(|ratio| ratio.p50)),
            ("ratio_low", self.ratio.map(|ratio| ratio.low)),
            ("ratio_high", self.ratio.map(|ratio| ratio.high)),
            ("ratio_vs_default", self.ratio_vs_default),
        ] {
            if value.is_some_and(|value| !value.is_finite() || value <= 0.0) {
                return fault(name, format!("expected a number above 0, found `{}`", optional(value)));
            }
        }
        for (name, count) in [("steps_per_launch", self.steps_per_launch), ("samples", self.samples)] {
            if count == 0 {
                return fault(name, "expected at least 1, found 0");
            }
        }
        if p10 > p50 || p50 > p90 {
            return fault("latency_us_p50", format!("expected p10 <= p50 <= p90, found {p10}, {p50}, {p90}"));
        }
        if let Some(ratio) = self.ratio.filter(|ratio| ratio.low > ratio.high) {
            return fault("ratio_low", format!("expected at most ratio_high {}, found {}", ratio.high, ratio.low));
        }
        match self.floor_us {
            Some(floor) if p50 < floor => {
                fault("latency_us_p50", format!("expected at least the floor of {floor} us, found {p50}"))
            }
            _ => Ok(()),
        }
    }
}

/// The cells of one row, by name.
struct Row<'a> {
    columns: &'a HashMap<String, usize>,
    cells: &'a [&'a str],
}

impl Row<'_> {
    fn kernel(&self) -> Result<String, RowFault> {
        self.text("kernel").map(|kernel| if kernel.is_empty() { DECODE_KERNEL.to_string() } else { kernel })
    }

    fn devices(&self) -> Result<u32, RowFault> {
        let by_name = |target: &str| target.rsplit_once("-x").and_then(|(_, devices)| devices.parse().ok());
        Ok(match self.number_or_empty("devices")? {
            Some(devices) => devices,
            None => by_name(self.cell("target")?).unwrap_or(1),
        })
    }

    fn cell(&self, column: &'static str) -> Result<&str, RowFault> {
        let found = |column: &str| self.columns.get(column).and_then(|at| self.cells.get(*at)).copied();
        match found(column) {
            Some(cell) if cell.len() > TEXT_BYTES_MAX => {
                fault(column, format!("expected at most {TEXT_BYTES_MAX} bytes, found {}", cell.len()))
            }
            Some(cell) => Ok(cell),
            None if ADDED_IN_3.contains(&column) || ADDED_IN_4.contains(&column) => Ok(""),
            None if ADDED_IN_2.contains(&column) && found("schema") == Some("1") => Ok(""),
            None => fault(column, "is missing"),
        }
    }

    fn text(&self, column: &'static str) -> Result<String, RowFault> {
        self.cell(column).map(str::to_string)
    }

    fn number<T: FromStr>(&self, column: &'static str) -> Result<T, RowFault> {
        match self.number_or_empty(column)? {
            Some(number) => Ok(number),
            None => fault(column, "expected a number, found nothing"),
        }
    }

    fn number_or_empty<T: FromStr>(&self, column: &'static str) -> Result<Option<T>, RowFault> {
        let cell = self.cell(column)?;
        if cell.is_empty() {
            return Ok(None);
        }
        let expected = if cell.parse::<f64>().is_ok() { "a whole number in range" } else { "a number" };
        match cell.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => fault(column, format!("expected {expected}, found `{}`", cut(cell))),
        }
    }

    fn digest(&self, column: &'static str) -> Result<Digest, RowFault> {
        match self.digest_or_empty(column)? {
            Some(digest) => Ok(digest),
            None => fault(column, "expected a digest, found nothing"),
        }
    }

    fn digest_or_empty(&self, column: &'static str) -> Result<Option<Digest>, RowFault> {
        match self.cell(column)? {
            "" => Ok(None),
            // Shared corpora may have only the first digits, which are enough to tell rows apart.
            cell if (SHORT_DIGITS..64).contains(&cell.len()) && cell.is_ascii() => {
                let padded = format!("{cell:0<64}");
                Digest::parse(&padded).map(Some).or_else(|error| fault(column, error.to_string()))
            }
            cell => Digest::parse(cell).map(Some).or_else(|error| fault(column, error.to_string())),
        }
    }

    /// Refuses figures that a verdict cannot have: most likely someone edited the row.
    fn empty(&self, columns: &[&'static str], verdict: &str) -> Result<(), RowFault> {
        for column in columns {
            let cell = self.cell(column)?;
            if !cell.is_empty() {
                return fault(column, format!("expected nothing for the verdict `{verdict}`, found `{}`", cut(cell)));
            }
        }
        Ok(())
    }

    fn verdict(&self) -> Result<Verdict, RowFault> {
        const CHECK: [&str; 5] = ["check_positions", "error_abs_max", "error_rel_l2", "kl_max", "argmax_agree"];
        const TIMING: [&str; 15] = [
            "position",
            "steps_per_launch",
            "samples",
            "latency_us_p10",
            "latency_us_p50",
            "latency_us_p90",
            "ratio_vs_incumbent_p50",
            "ratio_low",
            "ratio_high",
            "ratio_vs_default",
            "bytes_per_step",
            "floor_us",
            "clock_sm_mhz",
            "clock_mem_mhz",
            "throttle",
        ];
        let (name, detail) = (self.cell("verdict")?, self.text("verdict_detail")?);
        if !Verdict::NAMES.contains(&name) {
            return fault("verdict", format!("expected one of {}, found `{}`", Verdict::NAMES.join(", "), cut(name)));
        }
        if name == "ok" {
            self.empty(&["verdict_detail"], name)?;
            return Ok(Verdict::Ok { check: self.check_figures()?, timing: self.timing()? });
        }
        self.empty(&TIMING, name)?;
        match name {
            "infeasible" => self.empty(&CHECK, name).map(|()| Verdict::Infeasible { detail }),
            "rejected" => self.empty(&CHECK, name).map(|()| Verdict::Rejected { detail }),
            _ => {
                let checked = !self.cell("check_positions")?.is_empty();
                let check =
                    if checked { Some(self.check_figures()?) } else { self.empty(&CHECK, name).map(|()| None)? };
                Ok(match name {
                    "fail" => Verdict::Fail { detail, check },
                    "timeout" => Verdict::Timeout { detail, check },
                    _ => Verdict::Crash { detail, check },
                })
            }
        }
    }

    fn check_figures(&self) -> Result<CheckFigures, RowFault> {
        Ok(CheckFigures {
            positions: self.number("check_positions")?,
            error_abs_max: self.number("error_abs_max")?,
            error_rel_l2: self.number("error_rel_l2")?,
            kl_max: self.number("kl_max")?,
            argmax_agree: self.number("argmax_agree")?,
        })
    }

    fn timing(&self) -> Result<Timing, RowFault> {
        let ratio = match self.number_or_empty("ratio_vs_incumbent_p50")? {
            Some(p50) => Some(RatioInterval { p50, low: self.number("ratio_low")?, high: self.number("ratio_high")? }),
            None => {
                self.empty(&["ratio_low", "ratio_high"], "ok")?;
                None
            }
        };
        Ok(Timing {
            position: self.number("position")?,
            steps_per_launch: self.number("steps_per_launch")?,
            samples: self.number("samples")?,
            latency_us_p10: self.number("latency_us_p10")?,
            latency_us_p50: self.number("latency_us_p50")?,
            latency_us_p90: self.number("latency_us_p90")?,
            ratio,
            ratio_vs_default: self.number_or_empty("ratio_vs_default")?,
            bytes_per_step: self.number("bytes_per_step")?,
            floor_us: self.number_or_empty("floor_us")?,
            clock_sm_mhz: self.number_or_empty("clock_sm_mhz")?,
            clock_mem_mhz: self.number_or_empty("clock_mem_mhz")?,
            throttle: self.text("throttle")?,
        })
    }
}

/// Shortest text that reads back as the same value; empty for none.
fn optional(value: Option<impl Display>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// The nearest number of six significant digits.
fn six_digits(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

/// Text on one line: rows are lines, so that a torn one never swallows the next.
fn line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn cut(text: &str) -> String {
    text.chars().take(40).collect()
}

/// A number that no other trial of this or any other process is likely to have.
pub fn fresh_nonce() -> u64 {
    // The standard library seeds its hash maps from the system's random source; clock and process come on top.
    RandomState::new().hash_one((std::process::id(), SystemTime::now()))
}

/// `2026-01-31T12:00:00Z`.
pub fn utc_text(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Civil date from a day count, <https://howardhinnant.github.io/date_algorithms.html>: years start in March, and
    // 400 of them have 146097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

fn is_utc(text: &str) -> bool {
    const SHAPE: &[u8] = b"0000-00-00T00:00:00Z";
    text.len() == SHAPE.len()
        && text.bytes().zip(SHAPE).all(|(c, shape)| if *shape == b'0' { c.is_ascii_digit() } else { c == *shape })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    pub fn facts() -> Facts {
        let digest = |text: &str| Digest::of(text.as_bytes());
        Facts {
            tool: digest("tool"),
            host_kind: "x86_64-linux".into(),
            origin: Origin { host: "node7".into(), engine: "slurm".into(), job: "12_3".into() },
            manifest: "smollm, \"small\"".into(),
            model_name: "SmolLM2-135M".into(),
            model: ModelShape {
                model_graph: digest("model"),
                family: "LlamaForCausalLM".into(),
                layers: 30,
                hidden: 576,
                intermediate: 1536,
                heads: 9,
                kv_heads: 3,
                head_dim: 64,
                vocab: 49_152,
                parameters: 134_515_008,
                weights_dtype: "bf16".into(),
                cache_dtype: "bf16".into(),
                wire_dtype: "f32".into(),
                kernel: DECODE_KERNEL.into(),
            },
            machine: Machine {
                target: "h200".into(),
                target_kind: "cuda".into(),
                devices: 1,
                device_name: "NVIDIA H200".into(),
                device_uuid: "GPU-1".into(),
                driver: "580.65".into(),
                nvrtc: "12.8".into(),
                sm_count: 132,
            },
            point: Point {
                context_max: 4096,
                candidate: "split_k=2;warps=16".into(),
                candidate_digest: digest("split_k=2;warps=16"),
                space: digest("space"),
                schedule: Some(digest("schedule")),
                source: Some(digest("source")),
                cubin: Some(digest("cubin")),
                campaign: Some(digest("campaign")),
                trial: Some(3),
                seed: 7,
                proposer: Proposer::Local,
                incumbent: None,
                decision: None,
                predicted_us: Some(81.25),
            },
            cost: Cost { compile_ms: Some(2100.5), registers: Some(168), ..Cost::default() },
        }
    }

    pub fn check_figures() -> CheckFigures {
        CheckFigures { positions: 8, error_abs_max: 0.031, error_rel_l2: 0.0021, kl_max: 1e-5, argmax_agree: 8 }
    }

    pub fn timing(position: u32, latency_us: f64) -> Timing {
        Timing {
            position,
            steps_per_launch: 32,
            samples: 40,
            latency_us_p10: latency_us * 0.99,
            latency_us_p50: latency_us,
            latency_us_p90: latency_us * 1.1,
            ratio: Some(RatioInterval { p50: 0.97, low: 0.95, high: 0.99 }),
            ratio_vs_default: Some(0.9),
            bytes_per_step: 269_000_000,
            floor_us: Some(latency_us / 2.0),
            clock_sm_mhz: Some(1980),
            clock_mem_mhz: None,
            throttle: "none".into(),
        }
    }

    pub fn ok(position: u32, latency_us: f64) -> Verdict {
        Verdict::Ok { check: check_figures(), timing: timing(position, latency_us) }
    }

    pub fn trial(verdict: Verdict, nonce: u64) -> Trial {
        Trial::new(facts(), verdict, UNIX_EPOCH + Duration::from_secs(1_769_860_800), nonce).unwrap()
    }

    fn reread(cells: &[(&'static str, String)]) -> Result<Trial, RowFault> {
        let columns = cells.iter().enumerate().map(|(at, (name, _))| (name.to_string(), at)).collect();
        Trial::from_cells(&columns, &cells.iter().map(|(_, cell)| cell.as_str()).collect::<Vec<_>>())
    }

    fn set(cells: &mut [(&'static str, String)], column: &str, value: &str) {
        cells.iter_mut().find(|(name, _)| *name == column).unwrap().1 = value.to_string();
    }

    #[test]
    fn cells_stand_under_their_columns() {
        let names: Vec<&str> = trial(ok(32, 80.0), 1).cells().iter().map(|(name, _)| *name).collect();
        assert_eq!(names, COLUMNS.map(|column| column.name));
    }

    #[test]
    fn an_id_names_one_row() {
        let first = trial(ok(32, 80.0), 1);
        assert_eq!(first.trial_id(), trial(ok(32, 80.0), 1).trial_id());
        assert_ne!(first.trial_id(), trial(ok(32, 80.0), 2).trial_id(), "a repetition");
        assert_ne!(first.trial_id(), trial(ok(1024, 80.0), 1).trial_id(), "another position");
        assert_ne!(fresh_nonce(), fresh_nonce());
    }

    #[test]
    fn utc_is_the_civil_date() {
        let text = |seconds| utc_text(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(text(0), "1970-01-01T00:00:00Z");
        assert_eq!(text(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(text(951_868_800), "2000-03-01T00:00:00Z");
        assert_eq!(text(1_709_164_800), "2024-02-29T00:00:00Z");
        assert_eq!(text(1_769_860_801), "2026-01-31T12:00:01Z");
        assert_eq!(text(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(text(4_107_542_400), "2100-03-01T00:00:00Z", "2100 is no leap year");
    }

    #[test]
    fn a_timing_that_cannot_be_true_is_refused() {
        let broken = |change: fn(&mut Timing)| {
            let mut timing = timing(32, 80.0);
            change(&mut timing);
            let verdict = Verdict::Ok { check: check_figures(), timing };
            Trial::new(facts(), verdict, UNIX_EPOCH, 0).unwrap_err().column
        };
        assert_eq!(broken(|timing| timing.latency_us_p50 = f64::NAN), "latency_us_p50");
        assert_eq!(broken(|timing| timing.latency_us_p10 = 0.0), "latency_us_p10");
        assert_eq!(broken(|timing| timing.latency_us_p90 = 1.0), "latency_us_p50");
        assert_eq!(broken(|timing| timing.floor_us = Some(80.1)), "latency_us_p50");
        assert_eq!(broken(|timing| timing.samples = 0), "samples");
        assert_eq!(broken(|timing| timing.ratio = Some(RatioInterval { p50: 1.0, low: 1.1, high: 0.9 })), "ratio_low");
        let mut unplaced = facts();
        unplaced.point.schedule = None;
        assert_eq!(Trial::new(unplaced, ok(32, 80.0), UNIX_EPOCH, 0).unwrap_err().column, "schedule");
        let unexplained = Verdict::Rejected { detail: "\n".into() };
        assert_eq!(Trial::new(facts(), unexplained, UNIX_EPOCH, 0).unwrap_err().column, "verdict_detail");
    }

    #[test]
    fn figures_that_a_verdict_cannot_have_are_refused_when_read() {
        for column in ["latency_us_p50", "samples", "ratio_low", "floor_us", "throttle"] {
            let mut cells = trial(Verdict::Crash { detail: "SIGSEGV".into(), check: None }, 1).cells();
            set(&mut cells, column, "80");
            let fault = reread(&cells).unwrap_err();
            assert_eq!(
                fault.to_string(),
                format!("column `{column}`: expected nothing for the verdict `crash`, found `80`")
            );
        }
        let mut cells = trial(Verdict::Infeasible { detail: "x".into() }, 1).cells();
        set(&mut cells, "kl_max", "0.1");
        assert_eq!(reread(&cells).unwrap_err().column, "kl_max");
    }

    #[test]
    fn hand_edited_values_are_named() {
        for (column, value, expected) in [
            ("layers", "thirty", "expected a number, found `thirty`"),
            ("layers", "30.0", "expected a whole number in range, found `30.0`"),
            ("layers", "", "expected a number, found nothing"),
            ("vocab", "-1", "expected a whole number in range, found `-1`"),
            ("schema", "0", "expected 1 to 4, found 0"),
            ("cubin", "abc", "expected 64 lower-case hex digits, found `abc`"),
            ("verdict", "great", "expected one of ok, fail, infeasible, rejected, timeout, crash, found `great`"),
            ("decision", "good", "expected one of first, faster, simpler, reverted or nothing, found `good`"),
            ("trial", "-1", "expected a whole number in range, found `-1`"),
            ("proposer", "me", "expected one of default, prior, explore, local, external, seed, found `me`"),
            ("latency_us_p50", "1", "expected p10 <= p50 <= p90, found 79.2, 1, 88"),
            ("latency_us_p50", "", "expected a number, found nothing"),
            ("utc", "yesterday", "expected `2026-01-31T12:00:00Z`, found `yesterday`"),
            ("argmax_agree", "9", "expected at most 8, found 9"),
            ("predicted_us", "inf", "expected a number from 0 on, found `inf`"),
            ("ratio_vs_incumbent_p50", "", "expected nothing for the verdict `ok`, found `0.95`"),
        ] {
            let mut cells = trial(ok(32, 80.0), 1).cells();
            set(&mut cells, column, value);
            let fault = reread(&cells).unwrap_err();
            assert_eq!(fault.reason, expected, "{column} = {value}");
        }
        let mut cells = trial(ok(32, 80.0), 1).cells();
        cells.retain(|(name, _)| *name != "driver");
        assert_eq!(reread(&cells).unwrap_err().to_string(), "column `driver`: is missing");
    }

    #[test]
    fn only_what_was_checked_and_timed_is_kept() {
        let mut kept = facts();
        for decision in Decision::ALL {
            kept.point.decision = Some(decision);
            assert!(Trial::new(kept.clone(), ok(32, 80.0), UNIX_EPOCH, 0).is_ok());
            let crashed = Verdict::Crash { detail: "SIGSEGV".into(), check: None };
            let made = Trial::new(kept.clone(), crashed, UNIX_EPOCH, 0);
            assert_eq!(made.is_ok(), decision == Decision::Reverted, "{decision}");
        }
    }

    #[test]
    fn text_stays_on_one_line_and_reasons_stay_short() {
        let detail = format!("line one\r\nline two\t{}", "x".repeat(900));
        let cells = trial(Verdict::Fail { detail, check: None }, 1).cells();
        let (_, cell) = cells.iter().find(|(name, _)| *name == "verdict_detail").unwrap();
        assert!(cell.starts_with("line one  line two x") && cell.chars().count() == DETAIL_CHARS_MAX, "{cell}");
        let mut long = facts();
        long.point.candidate = "k=1;".repeat(4000);
        assert_eq!(Trial::new(long, ok(32, 80.0), UNIX_EPOCH, 0).unwrap_err().column, "candidate");
    }

    fn text() -> impl Strategy<Value = String> {
        "[a-zA-Z0-9 ,;=\"'µ\\\\|-]{0,24}"
    }

    fn figure() -> impl Strategy<Value = f64> {
        prop_oneof![0.0..1e12f64, Just(0.0), Just(f64::MIN_POSITIVE), Just(f64::INFINITY), Just(1.0 / 3.0)]
    }

    fn checks() -> impl Strategy<Value = CheckFigures> {
        (1..100u32, figure(), figure(), figure()).prop_map(|(positions, error_abs_max, error_rel_l2, kl_max)| {
            CheckFigures { positions, error_abs_max, error_rel_l2, kl_max, argmax_agree: positions / 2 }
        })
    }

    fn timings() -> impl Strategy<Value = Timing> {
        let ratio = prop::option::of(0.01..10.0f64);
        (any::<u32>(), 1..9999u32, 0.001..1e9f64, ratio, any::<u64>(), prop::option::of(any::<u32>()), text()).prop_map(
            |(position, samples, latency, ratio, bytes_per_step, clock_mem_mhz, throttle)| Timing {
                samples,
                ratio: ratio.map(|ratio| RatioInterval { p50: ratio, low: ratio * 0.9, high: ratio * 1.1 }),
                ratio_vs_default: ratio.map(|ratio| ratio * 0.8),
                bytes_per_step,
                clock_mem_mhz,
                throttle,
                ..timing(position, latency)
            },
        )
    }

    pub fn verdicts() -> impl Strategy<Value = Verdict> {
        let detail = || text().prop_map(|text| format!("x{text}"));
        let check = || prop::option::of(checks());
        prop_oneof![
            (checks(), timings()).prop_map(|(check, timing)| Verdict::Ok { check, timing }),
            (detail(), check()).prop_map(|(detail, check)| Verdict::Fail { detail, check }),
            detail().prop_map(|detail| Verdict::Infeasible { detail }),
            detail().prop_map(|detail| Verdict::Rejected { detail }),
            (detail(), check()).prop_map(|(detail, check)| Verdict::Timeout { detail, check }),
            (detail(), check()).prop_map(|(detail, check)| Verdict::Crash { detail, check }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_row_reads_back_as_it_was(
            verdict in verdicts(), name in text(), seed in any::<u64>(), at in 0..9_000_000_000u64,
        ) {
            let mut facts = facts();
            facts.manifest = name.clone();
            facts.point.candidate = name;
            facts.point.seed = seed;
            facts.point.predicted_us = None;
            facts.point.cubin = None;
            let trial = Trial::new(facts, verdict, UNIX_EPOCH + Duration::from_secs(at), seed).unwrap();
            prop_assert_eq!(reread(&trial.cells()).unwrap(), trial);
        }
    }
}
