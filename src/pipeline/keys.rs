//! Owns the keys of the stages: what each result depends on, and nothing else.
//!
//! Every stage but compile is keyed by a digest of its own code, too, because that decides the result: of the sources that
//! the stage reaches, taken when the crate is built (`build/sources.rs`). Executables that differ in anything else share a
//! cache. A stage keys on the *content* of the stage before it, so a change that leaves a result as it was stops there.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::candidate::Candidate;
use crate::codegen::KernelSource;
use crate::digest::{Digest, KeyPart, KeySink, key};
use crate::dtype::Precision;
use crate::lower::Batch;
use crate::target::Target;

/// A stage with its key and the text that explains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyed {
    pub stage: &'static str,
    pub key: Digest,
    pub why: String,
}

impl Keyed {
    fn of(stage: &'static str, part: &dyn KeyPart) -> Keyed {
        let (key, why) = key(part);
        Keyed { stage, key, why }
    }
}

/// Folders of the cache, in the order in which a build fills them.
pub const IMPORT: &str = "import";
pub const SCHEDULE: &str = "schedule";
pub const SOURCE: &str = "source";
pub const COMPILE: &str = "compile";
/// The version that compiled a source first.
pub const COMPILER: &str = "compiler";
pub const PACK: &str = "pack";
pub const CHECK: &str = "check";
pub const MEASURE: &str = "measure";
/// What candidates of a search are compared with; no stage of a build.
pub const EXPECT: &str = "expect";
/// The candidate that a search found best; no stage of a build.
pub const TUNED: &str = "tuned";
/// The digests of what was built, stored beside the parts of a kernel. It is no stage of a build.
pub const LINK: &str = "link";
/// What the kernels of a build are made of. It is no stage of a build.
pub const INDEX: &str = "index";
/// A search; its rows lie in the trials.
const CAMPAIGN: &str = "campaign";
/// Which compiler was found last; no stage of a build.
pub const NVRTC: &str = "nvrtc";

/// Digests of the code of stages, from the build script.
const CODES: [(&str, &str); 8] = [
    (IMPORT, env!("MONOBLOC_CODE_IMPORT")),
    (SCHEDULE, env!("MONOBLOC_CODE_SCHEDULE")),
    (SOURCE, env!("MONOBLOC_CODE_SOURCE")),
    (PACK, env!("MONOBLOC_CODE_PACK")),
    (CHECK, env!("MONOBLOC_CODE_CHECK")),
    (MEASURE, env!("MONOBLOC_CODE_MEASURE")),
    (EXPECT, env!("MONOBLOC_CODE_EXPECT")),
    (CAMPAIGN, env!("MONOBLOC_CODE_CAMPAIGN")),
];

/// Digest of the code that makes the results of `stage`.
///
/// # Panics
/// If no such stage has code: a test asks for all of them.
pub fn code(stage: &str) -> Digest {
    let hex = CODES.iter().find(|(name, _)| *name == stage).map(|(_, hex)| *hex);
    hex.and_then(|hex| Digest::parse(hex).ok()).expect("a digest of the build script")
}

/// Digest of the code of everything that a campaign runs: its search and all stages.
pub fn code_of_all() -> Digest {
    code(CAMPAIGN)
}

/// Config and headers to a model graph.
pub struct ImportKey<'a> {
    pub code: Digest,
    pub synthetic: bool,
    pub config: &'a [u8],
    pub generation_config: Option<&'a [u8]>,
    /// File name, length of the file, and digest of its header, of every weight file.
    pub headers: &'a [(String, u64, Digest)],
    /// Formats that weights are rounded to, as the manifest keys them.
    pub formats: &'a str,
}

impl ImportKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(IMPORT, self)
    }
}

impl KeyPart for ImportKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { code, synthetic, config, generation_config, headers, formats } = self;
        key.value("code", code);
        key.value("synthetic", synthetic);
        key.bytes("config.json", config);
        key.value("generation_config", generation_config.is_some());
        key.bytes("generation_config.json", generation_config.unwrap_or_default());
        key.list("header", headers.iter().map(|(name, bytes, digest)| format!("{name} {bytes} {digest}")));
        key.list("format", formats.lines());
    }
}

fn write_precision(key: &mut dyn KeySink, precision: &Precision) {
    let Precision { weights, cache, wire } = precision;
    key.value("precision.weights", weights);
    key.value("precision.cache", cache);
    key.value("precision.activations", wire);
}

/// A target as the lines of its key text, so that a change names the field.
fn write_spec(key: &mut dyn KeySink, target: &Target) {
    for line in target.key_text().lines() {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        key.text(name, value);
    }
}

/// Graph to a proven schedule.
pub struct ScheduleKey<'a> {
    pub code: Digest,
    pub graph: Digest,
    pub precision: Precision,
    pub context_max: u32,
    pub candidate: &'a Candidate,
    pub target: &'a Target,
    /// `None`: one row a step. Then it is no part of the key.
    pub batch: Option<Batch>,
}

impl ScheduleKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(SCHEDULE, self)
    }
}

impl KeyPart for ScheduleKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { code, graph, precision, context_max, candidate, target, batch } = self;
        key.value("code", code);
        key.value("graph", graph);
        write_precision(key, precision);
        key.value("context_max", context_max);
        write_candidate(key, candidate);
        write_spec(key, target);
        if let Some(Batch { rows, sequences, pages, page_rows, words }) = batch {
            key.value("rows", rows);
            key.value("sequences", sequences);
            key.value("pages", pages);
            key.value("page_rows", page_rows);
            key.value("words", words);
        }
    }
}

fn write_candidate(key: &mut dyn KeySink, candidate: &Candidate) {
    for pair in candidate.to_string().split(';') {
        let (knob, value) = pair.split_once('=').unwrap_or((pair, ""));
        key.text(&format!("candidate.{knob}"), value);
    }
}

/// Schedule to CUDA C++.
pub struct SourceKey<'a> {
    pub code: Digest,
    pub schedule: Digest,
    pub target: &'a Target,
}

impl SourceKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(SOURCE, self)
    }
}

impl KeyPart for SourceKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { code, schedule, target } = self;
        key.value("code", code);
        key.value("schedule", schedule);
        write_spec(key, target);
    }
}

/// The kernels of a build. Only what is known before any of them is there.
pub struct IndexKey<'a> {
    /// Of the stage that prints a source.
    pub code: Digest,
    /// Keys of the schedules, in the order of the manifest.
    pub schedules: &'a [Digest],
}

impl IndexKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(INDEX, self)
    }
}

impl KeyPart for IndexKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { code, schedules } = self;
        key.value("code", code);
        key.list("schedule", schedules.iter());
    }
}

/// CUDA C++ to a cubin: text, headers, options and compiler, and nothing of us.
pub struct CubinKey<'a> {
    pub source: &'a KernelSource,
    pub options: &'a [String],
    pub nvrtc: &'a str,
}

impl CubinKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(COMPILE, self)
    }
}

impl KeyPart for CubinKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { source, options, nvrtc } = self;
        let KernelSource { name, text, headers, arch } = source;
        key.text("nvrtc", nvrtc);
        key.list("option", options.iter());
        key.text("arch", arch);
        key.text("name", name);
        key.text("source", text);
        for (name, text) in headers {
            key.text(name, text);
        }
    }
}

/// What tells the weights of two models of one graph apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightsId {
    /// Values are a function of the seed.
    Synthetic { seed: u64 },
    Files {
        /// Name and content digest of each file.
        files: Vec<(String, Digest)>,
        /// Digest of how each tensor is made of their bytes, from [`Weights`](crate::model::weights::Weights). It is no part of the
        /// graph: `quantization_config` can give the same bytes another meaning in the same format.
        tensors: Digest,
        /// How matrices of codes are read, for people: `tensors` has more.
        readings: BTreeSet<String>,
    },
}

impl KeyPart for WeightsId {
    fn write(&self, key: &mut dyn KeySink) {
        match self {
            WeightsId::Synthetic { seed } => key.value("seed", seed),
            WeightsId::Files { files, tensors, readings } => {
                key.list("file", files.iter().map(|(name, digest)| format!("{name} {digest}")));
                key.value("tensors", tensors);
                key.list("codes", readings);
            }
        }
    }
}

/// Weights to a pack, which every candidate and every target of a model reads.
pub struct PackKey<'a> {
    pub code: Digest,
    pub graph: Digest,
    pub precision: Precision,
    /// Rows of the rotary tables.
    pub context_max: u32,
    /// Rows of the smallest units, the one knob that the layout depends on.
    pub unit_rows: u32,
    pub weights: &'a WeightsId,
}

impl PackKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(PACK, self)
    }
}

impl KeyPart for PackKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { code, graph, precision, context_max, unit_rows, weights } = self;
        key.value("code", code);
        key.value("graph", graph);
        write_precision(key, precision);
        key.value("context_max", context_max);
        key.value("unit_rows", unit_rows);
        key.nested("weights", *weights);
    }
}

/// The hardware that a check or a measurement speaks about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// `NVIDIA H200`, or the model of the CPU.
    pub name: String,
    /// The device's, empty for a CPU.
    pub uuid: String,
    /// Release of the driver, empty for a CPU.
    pub driver: String,
    /// Threads of the interpreter; 0 for a device.
    pub threads: usize,
}

impl KeyPart for Hardware {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { name, uuid, driver, threads } = self;
        key.text("name", name);
        key.text("uuid", uuid);
        key.text("driver", driver);
        key.value("threads", threads);
    }
}

/// A schedule with weights: what is common to check and measure.
pub struct SubjectKey<'a> {
    pub schedule: Digest,
    pub graph: Digest,
    pub weights: &'a WeightsId,
    pub candidate: &'a Candidate,
    pub target: &'a Target,
    /// Digest of the cubin that a device runs.
    pub cubin: Option<Digest>,
}

impl KeyPart for SubjectKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { schedule, graph, weights, candidate, target, cubin } = self;
        key.value("schedule", schedule);
        key.value("graph", graph);
        key.nested("weights", *weights);
        write_candidate(key, candidate);
        write_spec(key, target);
        key.value("cubin", cubin.map_or("none".to_string(), |cubin| cubin.to_string()));
    }
}

/// Kind of hardware: what a check holds for. Devices of one name run the same machine code, whatever their driver is.
fn write_kind(key: &mut dyn KeySink, hardware: &Hardware) {
    let Hardware { name, uuid: _, driver: _, threads } = hardware;
    key.text("hardware.name", name);
    key.value("hardware.threads", threads);
}

/// Numerics at these positions, on one kind of hardware.
pub struct CheckKey<'a> {
    pub subject: &'a SubjectKey<'a>,
    pub hardware: &'a Hardware,
    pub positions: &'a [u32],
    /// Sizes the launches of a device, so a change costs a check there; `None` for the interpreter, which does not use it.
    pub steps_per_launch: Option<u32>,
}

impl CheckKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(CHECK, self)
    }
}

impl KeyPart for CheckKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { subject, hardware, positions, steps_per_launch } = self;
        key.value("code", code(CHECK));
        subject.write(key);
        write_kind(key, hardware);
        key.list("check_positions", positions.iter());
        key.list("steps_per_launch", steps_per_launch.iter());
    }
}

/// A kernel of a set, compared with what every kernel of the model computes, on one kind of hardware.
pub struct KernelCheckKey<'a> {
    /// Of the kernel, or of what several kernels are compared for.
    pub name: &'a str,
    /// Digests of the schedules that it is made of, and of the cubins that run.
    pub schedules: &'a [Digest],
    pub cubins: &'a [Digest],
    pub graph: Digest,
    pub weights: &'a WeightsId,
    pub target: &'a Target,
    pub hardware: &'a Hardware,
    /// Sizes of the texts.
    pub texts: &'a str,
}

impl KernelCheckKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(CHECK, self)
    }
}

impl KeyPart for KernelCheckKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { name, schedules, cubins, graph, weights, target, hardware, texts } = self;
        key.value("code", code(CHECK));
        // What a kernel walks is encoded when it is loaded, from the schedule and by this code.
        key.value("code of tables", code(SOURCE));
        key.text("kernel", name);
        key.list("schedule", schedules.iter());
        key.list("cubin", cubins.iter());
        key.value("graph", graph);
        key.nested("weights", *weights);
        write_spec(key, target);
        write_kind(key, hardware);
        key.text("texts", texts);
    }
}

/// Logits that every kernel of a set has to reproduce.
pub struct TextsKey<'a> {
    /// The schedule that the interpreter executes for it.
    pub schedule: Digest,
    pub graph: Digest,
    pub weights: &'a WeightsId,
    /// Sizes of the texts.
    pub texts: &'a str,
}

impl TextsKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(EXPECT, self)
    }
}

impl KeyPart for TextsKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { schedule, graph, weights, texts } = self;
        key.value("code", code(EXPECT));
        key.value("schedule", schedule);
        key.value("graph", graph);
        key.nested("weights", *weights);
        key.text("texts", texts);
    }
}

/// Times at these positions. Not keyed by the figures of the check: they say that it may be timed, not how fast it is.
pub struct MeasureKey<'a> {
    pub subject: &'a SubjectKey<'a>,
    pub hardware: &'a Hardware,
    pub positions: &'a [u32],
    pub steps_per_launch: u32,
    /// The floor comes from it.
    pub read_bytes_per_s: Option<f64>,
}

impl MeasureKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(MEASURE, self)
    }
}

impl KeyPart for MeasureKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { subject, hardware, positions, steps_per_launch, read_bytes_per_s } = self;
        key.value("code", code(MEASURE));
        subject.write(key);
        key.nested("hardware", *hardware);
        key.value("read_bytes_per_s", read_bytes_per_s.map_or("unmeasured".to_string(), |value| format!("{value:?}")));
        key.list("time_positions", positions.iter());
        key.value("steps_per_launch", steps_per_launch);
    }
}

/// Logits that every candidate of a search has to reproduce.
pub struct ExpectKey<'a> {
    pub code: Digest,
    /// The schedule that the interpreter executes for it.
    pub schedule: Digest,
    pub graph: Digest,
    pub weights: &'a WeightsId,
    pub positions: &'a [u32],
    /// Whether the check runs on a device: it has another reference and other costs.
    pub device: bool,
}

impl ExpectKey<'_> {
    pub fn keyed(&self) -> Keyed {
        Keyed::of(EXPECT, self)
    }
}

impl KeyPart for ExpectKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { code, schedule, graph, weights, positions, device } = self;
        key.value("code", code);
        key.value("schedule", schedule);
        key.value("graph", graph);
        key.nested("weights", *weights);
        key.list("check_positions", positions.iter());
        key.value("device", device);
    }
}

/// What a search is about: its name in the rows of its trials.
pub struct CampaignKey<'a> {
    pub code: Digest,
    pub graph: Digest,
    /// A verdict of a trial is about them: a search that goes on believes it.
    pub weights: &'a WeightsId,
    pub precision: Precision,
    pub context_max: u32,
    pub positions: &'a [u32],
    pub steps_per_launch: u32,
    pub target: &'a Target,
    pub hardware: &'a Hardware,
    pub space: Digest,
    pub seed: u64,
    /// The kernel that is searched.
    pub kernel: String,
    /// The candidate that all others are compared with.
    pub begun: &'a Candidate,
}

impl CampaignKey<'_> {
    pub fn digest(&self) -> Digest {
        key(self).0
    }
}

impl KeyPart for CampaignKey<'_> {
    fn write(&self, key: &mut dyn KeySink) {
        let Self {
            code,
            graph,
            weights,
            precision,
            context_max,
            positions,
            steps_per_launch,
            target,
            hardware,
            space,
            seed,
            kernel,
            begun,
        } = self;
        key.value("code", code);
        key.value("graph", graph);
        key.nested("weights", *weights);
        write_precision(key, precision);
        key.value("context_max", context_max);
        key.list("time_positions", positions.iter());
        key.value("steps_per_launch", steps_per_launch);
        write_spec(key, target);
        // Not its UUID: a campaign may go on with another device of the same name.
        key.text("hardware", &hardware.name);
        key.value("threads", hardware.threads);
        key.value("space", space);
        key.value("seed", seed);
        key.value("kernel", kernel);
        key.value("begun", begun);
    }
}
