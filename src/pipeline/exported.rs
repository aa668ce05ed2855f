//! Owns exports as they are read: what a folder must hold, and the checks before any of it runs.
//!
//! ```text
//! export.json            every other file with its length and digest; what the parts of each target are
//! export.b3              digest of export.json
//! model/                 config.json and what the tokenizer reads
//! targets/NAME.toml      record of a target
//! NAME/KERNEL.mkir       schedule; KERNEL is `text`, `prompt`, `waves`, `tail` or `batch`, or with `batch_invariant` `steps32` or `steps64`
//! NAME/serve-N.mkir      of a CUDA target: schedule of a kernel of a server, for steps of N rows
//! NAME/KERNEL.cubin      its kernel, of a CUDA target; those of a server are `serve-N`, `serve-N-splits`, `serve-waves`, `serve-tail` and
//!                        `sampler`
//! weights-DIGEST.pack    weights, for every kernel that names it
//! ```
//!
//! A target of several devices has the record of one of them and their number. Its pack is that of one device, byte for byte: each device
//! loads the part that its schedule gives it.
//!
//! A file is read once, compared with its digest, and used from those bytes. A schedule is parsed and proven as one of the cache is.
//! The source of a kernel is generated again and compared with the source that the cubin was compiled from, so a cubin runs only if
//! this version of monobloc would compile the same one. Queues and the layout of the weights are compared likewise.
//!
//! Not promised: a user who can write the folder can replace a file and its digest. Then the schedule is still proven, and a launch still
//! has a deadline, but a cubin or weights that compute something else are not noticed. The digest of `export.json`, which `export`
//! prints, names all of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::device_sampler::sampler_digest;
use super::device_steps::{By, StepsKernel};
use super::device_waves::prompt_digests;
use super::invariant;
use super::kernels::{self, Code, KernelSet, Served, alike_rows};
use super::stages::{kernel_digests, map_file};
use crate::candidate::WaveKnobs;
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::files::{self, read_bytes, read_text};
use crate::interp::Pack;
use crate::ir::layout::pack_bytes;
use crate::ir::op::Role;
use crate::ir::parse::parse;
use crate::manifest::Manifest;
use crate::pack::identity;
use crate::target::{DEVICES, Target, TargetKind};
use crate::validate::{Validated, all_share_caches, share_caches, validate};

/// The file that lists the files of an export.
pub const INDEX: &str = "export.json";
/// The digest of [`INDEX`].
pub(super) const SEAL: &str = "export.b3";
/// The folder with the files of the tokenizer.
pub(super) const MODEL: &str = "model";
/// Version of the layout of the folder. A folder of another one is refused.
pub(super) const FORMAT: u32 = 6;

/// An index has some hundred bytes for each file.
const INDEX_BYTES_MAX: u64 = 16 << 20;
/// A schedule of the largest models has tens of megabytes, and so has a tokenizer.
const PART_BYTES_MAX: u64 = 1 << 30;

/// `export.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub format: u32,
    /// Version of the monobloc that wrote it.
    pub monobloc: String,
    /// Name of the manifest.
    pub name: String,
    /// What the model is called.
    pub model: String,
    pub precision: PrecisionNames,
    pub vocab: u32,
    pub eos: Vec<u32>,
    pub bos: Option<u32>,
    pub context_max: u32,
    pub steps_per_launch: u32,
    /// Copied from the manifest.
    pub sequences_max: Option<u32>,
    pub chunk_max: Option<u32>,
    pub cache_pages: Option<u32>,
    /// Left out where it is false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub batch_invariant: bool,
    /// Parameters of the model, which bound the positions of a check.
    pub parameters: u64,
    /// It was made with `--unchecked`. Left out where it is false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
    pub targets: Vec<TargetParts>,
    /// Every file but this one and its digest, by path below the folder.
    pub files: BTreeMap<String, FileFacts>,
}

/// Element types, as a manifest names them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PrecisionNames {
    pub weights: String,
    pub cache: String,
    pub activations: String,
}

/// One target of an export. Paths are keys of [`Index::files`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TargetParts {
    pub name: String,
    /// The record of one of its devices.
    pub record: String,
    /// Devices that run the model together. Left out where it is one.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub devices: u32,
    /// Its knobs.
    pub candidate: String,
    pub pack: String,
    /// From [`identity`]: where the weights lie in the pack.
    pub pack_identity: String,
    pub kernels: Vec<KernelParts>,
    /// What decodes several requests on a device. `None`: the target is a CPU, or has no kernels for several rows.
    pub served: Option<ServedParts>,
    /// Kinds of devices, each with the files that were checked on one: cubins, or the schedules of a CPU.
    pub checked: BTreeMap<String, Vec<String>>,
}

fn one() -> u32 {
    1
}

fn is_one(devices: &u32) -> bool {
    *devices == 1
}

/// The kernels of a server on a device. With `batch_invariant`, all of `steps` are by waves and add up in one order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServedParts {
    /// Requests that run at a time, at most.
    pub running_max: u32,
    pub sampler: SamplerParts,
    /// Ascending by rows, over one cache. That of one row is a kernel for one row over the pages of the others.
    pub steps: Vec<StepsParts>,
    /// For steps of which few rows have long histories: as many rows as one of `steps` by waves has. `None` with `batch_invariant`.
    pub ragged: Option<StepsParts>,
    /// Kernels of waves for prompts, over the schedule of the first of `steps` that has several rows: of chunks, then of their tail.
    pub prompts: Vec<CompiledParts>,
    /// Knobs of the plan of chunks, as they print. Left out where every choice is left to the rules.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prompt_knobs: String,
}

/// The kernel that chooses tokens. It depends on no schedule.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SamplerParts {
    pub cubin: String,
    /// Digest of the source that the cubin was compiled from.
    pub source: String,
    /// Version of the compiler.
    pub nvrtc: String,
}

/// What runs steps of up to `rows` rows of several requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepsParts {
    pub rows: u32,
    pub by: By,
    pub schedule: String,
    pub compiled: CompiledParts,
    /// As [`ServedParts::prompt_knobs`], of a plan of steps.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub knobs: String,
}

/// What a kernel is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Does {
    /// Decodes one text.
    Text,
    /// Reads the prompt of a text in chunks, on a device.
    Prompt,
    /// Reads long chunks of a prompt. Its schedule is that of `Prompt`.
    Waves,
    /// Decides what follows the last one of those. Its schedule is that of `Prompt`.
    Tail,
    /// Decodes several sequences a step.
    Batch,
    /// Steps of up to 32 rows that add up as those of up to 64 do, on a device. They read prompts, too.
    Steps32,
    Steps64,
}

impl Does {
    /// What reads prompts in waves: its name in a set of kernels.
    pub fn in_set(self) -> Option<kernels::Does> {
        match self {
            Does::Waves => Some(kernels::Does::Chunk),
            Does::Tail => Some(kernels::Does::Tail),
            Does::Text | Does::Prompt | Does::Batch | Does::Steps32 | Does::Steps64 => None,
        }
    }

    /// The other way round, of a kernel that reads prompts in waves.
    pub fn of_prompts(does: kernels::Does) -> Does {
        if does == kernels::Does::Tail { Does::Tail } else { Does::Waves }
    }

    pub fn name(self) -> &'static str {
        match self {
            Does::Text => "text",
            Does::Prompt => "prompt",
            Does::Waves => "waves",
            Does::Tail => "tail",
            Does::Batch => "batch",
            Does::Steps32 => "steps32",
            Does::Steps64 => "steps64",
        }
    }

    /// Rows of a kernel that adds up as those for other numbers of rows do.
    pub fn alike_rows(self) -> Option<u32> {
        match self {
            Does::Steps32 => Some(32),
            Does::Steps64 => Some(64),
            Does::Text | Does::Prompt | Does::Waves | Does::Tail | Does::Batch => None,
        }
    }
}

/// A schedule, with what was made of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KernelParts {
    pub does: Does,
    pub schedule: String,
    /// `None`: the interpreter executes the schedule.
    pub compiled: Option<CompiledParts>,
    /// As [`ServedParts::prompt_knobs`], of a kernel that reads prompts in waves.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub knobs: String,
}

impl KernelParts {
    /// The file that is checked: the cubin, or the schedule of a CPU.
    pub fn code(&self) -> &str {
        self.compiled.as_ref().map_or(&self.schedule, |compiled| &compiled.cubin)
    }
}

/// The link from a proven schedule to a cubin.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CompiledParts {
    pub cubin: String,
    /// Digest of the source that the cubin was compiled from.
    pub source: String,
    /// Digest of the queues as they are uploaded.
    pub queues: String,
    /// Version of the compiler.
    pub nvrtc: String,
}

/// What a file must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileFacts {
    pub bytes: u64,
    pub digest: String,
}

/// A folder that `export` wrote, with its index and its small files checked.
#[derive(Debug, Clone)]
pub struct Exported {
    folder: Folder,
    digest: Digest,
    manifest: Manifest,
}

/// The files of an export, by its index.
#[derive(Debug, Clone)]
struct Folder {
    dir: PathBuf,
    index: Index,
}

/// A kernel of an export whose schedule was proven in this process.
pub(super) struct Kernel {
    pub validated: Arc<Validated>,
    /// `None` on the CPU.
    pub cubin: Option<Code>,
    /// The file that is checked.
    pub file: String,
    /// Of a kernel that reads prompts in waves.
    pub knobs: WaveKnobs,
}

/// The kind of this CPU, for exports: their schedules run on any one.
pub(super) fn cpu_kind() -> String {
    std::env::consts::ARCH.to_string()
}

impl Exported {
    /// Whether a path is the folder of an export, whole or not.
    pub fn is_at(path: &Path) -> bool {
        path.is_dir() && (path.join(INDEX).exists() || path.join(SEAL).exists())
    }

    /// Reads the index, and compares the index, the files of the model and the records of targets with their digests. Schedules, cubins
    /// and weights are compared when they are read.
    ///
    /// # Errors
    /// A folder of another version, a file that is missing or changed, a file of the model that the index does not have.
    pub fn open(dir: &Path) -> Result<Exported, Fault> {
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
        let (bytes, digest) = sealed_index(&dir)?;
        let folder = Folder { index: parse_index(&dir, &bytes)?, dir };
        let small = |path: &&String| path.starts_with("model/") || path.starts_with("targets/");
        for path in folder.index.files.keys().filter(small) {
            folder.read(path)?;
        }
        folder.refuse_strange_files()?;
        // It reads the records again, which are sound now.
        let manifest = manifest(&folder.dir, &folder.index)?;
        Ok(Exported { folder, digest, manifest })
    }

    pub(super) fn index(&self) -> &Index {
        &self.folder.index
    }

    /// A manifest that says what the export is: its name, targets, limits, and the folder of its tokenizer. Nothing can be built of it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What the model is called.
    pub fn model_name(&self) -> &str {
        &self.index().model
    }

    /// Digest of the index, which names every file by its digest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether text can be turned into token ids.
    pub fn has_tokenizer(&self) -> bool {
        self.index().files.contains_key("model/tokenizer.json")
    }

    pub(super) fn parts(&self, target: &Target) -> Result<&TargetParts, Fault> {
        let found = self.index().targets.iter().find(|parts| parts.name == target.name);
        let place = self.folder.dir.display();
        found.ok_or_else(|| Fault::input(format!("`{place}` has no target `{}`", target.name)))
    }

    /// A kernel of a target with a proof of this process; `None`: the export has no such kernel.
    ///
    /// # Errors
    /// A file that is missing or changed, a schedule that is not proven, and parts that do not belong together or to this version.
    pub(super) fn kernel(&self, target: &Target, does: Does) -> Result<Option<Kernel>, Fault> {
        let parts = self.parts(target)?;
        let Some(kernel) = parts.kernels.iter().find(|kernel| kernel.does == does) else { return Ok(None) };
        let validated = self.proven(target, &kernel.schedule)?;
        let place = self.folder.dir.join(&kernel.schedule).display().to_string();
        let knobs = self.folder.knobs(&kernel.knobs)?;
        let cubin = match (&kernel.compiled, target.kind) {
            (None, TargetKind::Cpu) => None,
            (Some(compiled), TargetKind::Cuda) => {
                let made = self.folder.digests(&validated, target, (does, &knobs), &place)?;
                let bytes = self.folder.cubin(compiled, made, &place)?;
                Some(Code { bytes, nvrtc: compiled.nvrtc.clone() })
            }
            _ => return Err(Fault::input(format!("`{place}` does not fit the kind of target `{}`", target.name))),
        };
        Ok(Some(Kernel { validated: Arc::new(validated), cubin, file: kernel.code().to_string(), knobs }))
    }

    /// The schedule at a path of the index, proven, for the model and the weights of the export.
    fn proven(&self, target: &Target, path: &str) -> Result<Validated, Fault> {
        let (folder, parts) = (&self.folder, self.parts(target)?);
        let place = folder.dir.join(path).display().to_string();
        let text = String::from_utf8(folder.read(path)?)
            .map_err(|_| Fault::input(format!("`{place}` is no text, expected a schedule")))?;
        let parsed = parse(&text).map_err(|error| folder.foreign(&format!("`{place}` cannot be read: {error}")))?;
        let validated = validate(parsed, target).map_err(|rejected| {
            let Fault { message, .. } = rejected.into();
            Fault::input(format!("`{place}` is not proven: {message}")).with_remedy(EXPORT_AGAIN)
        })?;
        let (program, layout) = (&validated.schedule().program, identity(validated.schedule()));
        let devices = validated.schedule().machine.devices;
        if devices != target.devices {
            let message = format!("`{place}` is for {devices} devices, expected the {} of its target", target.devices);
            return Err(Fault::input(message).with_remedy(EXPORT_AGAIN));
        }
        let logits = program.grids.iter().find_map(|grid| grid.operand(Role::Logits));
        let vocab = logits.map(|logits| program.buffers[logits.buffer.index()].cols);
        let limits = (vocab, program.context_max);
        if limits != (Some(folder.index.vocab), folder.index.context_max)
            || Digest::from_bytes(layout).to_string() != parts.pack_identity
        {
            return Err(folder.foreign(&format!("`{place}` is for another model, or for weights in another layout")));
        }
        Ok(validated)
    }

    /// The kernels of a server on a device, each schedule with a proof of this process; `None`: the export has none.
    ///
    /// # Errors
    /// As [`Exported::kernel`]; kernels that cannot share a cache.
    pub(super) fn served(&self, target: &Target) -> Result<Option<Served>, Fault> {
        let Some(parts) = &self.parts(target)?.served else { return Ok(None) };
        let folder = &self.folder;
        let mut proven: BTreeMap<&str, Arc<Validated>> = BTreeMap::new();
        for StepsParts { schedule, .. } in parts.steps.iter().chain(&parts.ragged) {
            if !proven.contains_key(schedule.as_str()) {
                proven.insert(schedule, Arc::new(self.proven(target, schedule)?));
            }
        }
        let Some(largest) = parts.steps.last().map(|steps| Arc::clone(&proven[steps.schedule.as_str()])) else {
            return Err(folder.foreign("a server without kernels"));
        };
        all_share_caches(proven.values().map(|validated| &**validated), &largest)
            .map_err(|differs| folder.foreign(&differs.to_string()))?;
        let of_one = |steps: &StepsParts| proven[steps.schedule.as_str()].schedule().program.rows == 1;
        let ascend = parts.steps.windows(2).all(|pair| pair[0].rows < pair[1].rows);
        if !ascend || parts.steps.iter().any(|steps| of_one(steps) != (steps.rows == 1)) {
            return Err(folder.foreign("kernels of a server for other numbers of rows"));
        }
        let is_alike = invariant::is_asked(&self.manifest, target);
        let cuts = |steps: &StepsParts| steps.by == By::Splits;
        let beside = |cut: &StepsParts| parts.steps.iter().any(|of| of.by == By::Waves && of.rows == cut.rows);
        if parts.steps.iter().any(cuts) || parts.ragged.iter().any(|cut| is_alike || !cuts(cut) || !beside(cut)) {
            return Err(folder.foreign("a kernel of a server for long histories"));
        }
        let mut set = vec![];
        let mut first = None;
        for &StepsParts { rows, by, ref schedule, ref compiled, ref knobs } in parts.steps.iter().chain(&parts.ragged) {
            let (validated, place) = (Arc::clone(&proven[schedule.as_str()]), folder.dir.join(schedule));
            let knobs = folder.knobs(knobs)?;
            let kernel = StepsKernel { validated, rows, by, knobs };
            let made =
                if is_alike { invariant::digests(target, &kernel.validated, rows)? } else { kernel.digests(target)? };
            let bytes = folder.cubin(compiled, made, &place.display().to_string())?;
            let code = Code { bytes, nvrtc: compiled.nvrtc.clone() };
            if rows > 1 && first.is_none() {
                first = Some(kernel.validated.clone());
            }
            let does = kernels::Does::Steps { rows, by };
            set.push(kernels::Kernel { does, validated: Some(kernel.validated), knobs, code });
        }
        let Some(first) = first else {
            return Err(folder.foreign("a server without kernels for several rows"));
        };
        if !parts.prompts.is_empty() {
            let knobs = folder.knobs(&parts.prompt_knobs)?;
            let made = prompt_digests(target, &first, &knobs)?;
            if made.len() != parts.prompts.len() {
                return Err(folder.foreign(&format!("{} kernels for prompts of a server", parts.prompts.len())));
            }
            for (does, digests) in made {
                let named = format!("{}/serve-{}.cubin", target.name, Does::of_prompts(does).name());
                let compiled = parts.prompts.iter().find(|compiled| compiled.cubin == named);
                let compiled = compiled.ok_or_else(|| folder.foreign(&format!("a server without `{named}`")))?;
                let bytes = folder.cubin(compiled, digests, &compiled.cubin)?;
                let code = Code { bytes, nvrtc: compiled.nvrtc.clone() };
                set.push(kernels::Kernel { does, validated: Some(first.clone()), knobs, code });
            }
        }
        let SamplerParts { cubin, source, nvrtc } = &parts.sampler;
        if sampler_digest(target)?.to_string() != *source {
            return Err(folder.foreign("the sampler has another source here"));
        }
        let code = Code { bytes: folder.read(cubin)?, nvrtc: nvrtc.clone() };
        let (does, knobs) = (kernels::Does::Sampler, WaveKnobs::default());
        set.push(kernels::Kernel { does, validated: None, knobs, code });
        Ok(Some(Served { running_max: parts.running_max, set: KernelSet::new(is_alike, set)? }))
    }

    /// The files of [`Exported::served`] that are checked.
    ///
    /// # Errors
    /// A target that the export does not have.
    pub(super) fn served_files(&self, target: &Target) -> Result<Vec<&str>, Fault> {
        let Some(ServedParts { sampler, steps, ragged, prompts, .. }) = &self.parts(target)?.served else {
            return Ok(vec![]);
        };
        let steps = steps.iter().chain(ragged).map(|steps| &steps.compiled.cubin);
        let files = steps.chain(prompts.iter().map(|compiled| &compiled.cubin)).chain([&sampler.cubin]);
        Ok(files.map(String::as_str).collect())
    }

    /// Digest of the weights of a target.
    ///
    /// # Errors
    /// An index that does not list them.
    pub(super) fn pack_digest(&self, target: &Target) -> Result<Digest, Fault> {
        let facts = self.folder.facts(&self.parts(target)?.pack)?;
        Digest::parse(&facts.digest).map_err(|_| self.folder.foreign("weights without a digest"))
    }

    /// The folder.
    pub(super) fn place(&self) -> &Path {
        &self.folder.dir
    }

    /// Whether all of `files` were checked on a device of this kind.
    ///
    /// # Errors
    /// A target that the export does not have.
    pub(super) fn was_checked(&self, target: &Target, kind: &str, files: &[&str]) -> Result<bool, Fault> {
        let checked = self.parts(target)?.checked.get(kind);
        Ok(files.iter().all(|file| checked.is_some_and(|checked| checked.iter().any(|of| of == file))))
    }

    /// Rows of a launch of the kernels of a server on a device, at most; `None`: the export has none.
    ///
    /// # Errors
    /// A target that the export does not have.
    pub(super) fn step_rows(&self, target: &Target) -> Result<Option<u32>, Fault> {
        let Some(ServedParts { running_max, steps, .. }) = &self.parts(target)?.served else { return Ok(None) };
        Ok(match invariant::is_asked(&self.manifest, target) {
            true => Some(alike_rows(*running_max)),
            false => steps.last().map(|steps| steps.rows),
        })
    }

    /// [`Exported::kernel`] for a kernel over the cache of `one`.
    ///
    /// # Errors
    /// The same, and a kernel that cannot share that cache.
    pub(super) fn kernel_beside(&self, target: &Target, does: Does, one: &Validated) -> Result<Option<Kernel>, Fault> {
        let Some(kernel) = self.kernel(target, does)? else { return Ok(None) };
        share_caches(&kernel.validated, one).map_err(|differs| self.folder.foreign(&differs.to_string()))?;
        Ok(Some(kernel))
    }

    /// The weights of a target, mapped and compared with their digest.
    ///
    /// # Errors
    /// A file that is missing, changed, or of another length than the weights of the schedule.
    pub(super) fn pack(&self, target: &Target, validated: &Validated) -> Result<Pack, Fault> {
        let (folder, path) = (&self.folder, &self.parts(target)?.pack);
        let (facts, place, length) = (folder.facts(path)?, folder.dir.join(path), folder.length(path)?);
        if length != facts.bytes {
            return Err(folder.changed(path, facts, &format!("{length} bytes")));
        }
        // Before any of it is read: the length that the index names is bounded by nothing else.
        let needed = pack_bytes(validated.schedule());
        if length != needed {
            let place = place.display();
            return Err(folder.foreign(&format!("`{place}` has {length} bytes, expected the {needed} of its schedule")));
        }
        let pack = map_file(&place, length)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update_rayon((*pack).as_ref());
        let found = Digest::from(hasher.finalize());
        if found.to_string() != facts.digest {
            return Err(folder.changed(path, facts, &found.short()));
        }
        Ok(pack)
    }
}

impl Folder {
    /// Digests of what this version would compile for a kernel, and of what that walks.
    fn digests(
        &self,
        validated: &Validated,
        target: &Target,
        (does, knobs): (Does, &WaveKnobs),
        place: &str,
    ) -> Result<[Digest; 2], Fault> {
        match (does.in_set(), does.alike_rows()) {
            (Some(of), _) => {
                let digests = prompt_digests(target, validated, knobs)?;
                let foreign = || self.foreign(&format!("`{place}` has no kernel of `{}` here", does.name()));
                digests.iter().find(|(does, _)| *does == of).map(|(_, digests)| *digests).ok_or_else(foreign)
            }
            (_, Some(rows)) => invariant::digests(target, validated, rows),
            _ => kernel_digests(validated, target),
        }
    }

    /// Knobs of a wave kernel, as the index has them.
    fn knobs(&self, text: &str) -> Result<WaveKnobs, Fault> {
        WaveKnobs::parse(text).map_err(|error| self.foreign(&format!("knobs of a wave kernel: {error}")))
    }

    /// A cubin, if it was compiled from what this version would compile.
    fn cubin(&self, compiled: &CompiledParts, [source, queues]: [Digest; 2], place: &str) -> Result<Vec<u8>, Fault> {
        if source.to_string() != compiled.source {
            return Err(self.foreign(&format!("the kernel of `{place}` has another source here")));
        }
        if queues.to_string() != compiled.queues {
            return Err(self.foreign(&format!("the kernel of `{place}` has other queues here")));
        }
        self.read(&compiled.cubin)
    }

    /// A file of the index, compared with its digest.
    fn read(&self, path: &str) -> Result<Vec<u8>, Fault> {
        let facts = self.facts(path)?;
        let length = self.length(path)?;
        if length != facts.bytes || length > PART_BYTES_MAX {
            return Err(self.changed(path, facts, &format!("{length} bytes")));
        }
        let bytes = read_bytes(&self.dir.join(path), facts.bytes)?;
        let found = Digest::of(&bytes);
        match found.to_string() == facts.digest {
            true => Ok(bytes),
            false => Err(self.changed(path, facts, &found.short())),
        }
    }

    fn facts(&self, path: &str) -> Result<&FileFacts, Fault> {
        let place = self.dir.join(INDEX);
        self.index.files.get(path).ok_or_else(|| {
            Fault::input(format!("`{}` names `{path}` and does not list it", place.display())).with_remedy(EXPORT_AGAIN)
        })
    }

    fn length(&self, path: &str) -> Result<u64, Fault> {
        let place = self.dir.join(path);
        match files::open(&place) {
            Ok(file) => file
                .metadata()
                .map(|metadata| metadata.len())
                .map_err(|error| Fault::environment(format!("cannot read `{}`: {error}", place.display()))),
            Err(_) if !place.exists() => Err(missing(&place)),
            Err(error) => Err(error.into()),
        }
    }

    fn changed(&self, path: &str, facts: &FileFacts, found: &str) -> Fault {
        let FileFacts { bytes, digest } = facts;
        changed(&self.dir.join(path), &format!("{bytes} bytes with content {}", short(digest)), found)
    }

    /// A fault of a folder that another version wrote.
    fn foreign(&self, what: &str) -> Fault {
        let (theirs, ours) = (&self.index.monobloc, env!("CARGO_PKG_VERSION"));
        Fault::input(format!("{what}: monobloc {theirs} wrote it, this is a build of {ours}")).with_remedy(EXPORT_AGAIN)
    }

    /// The tokenizer looks for files by name, so one that was added would be read.
    fn refuse_strange_files(&self) -> Result<(), Fault> {
        let folder = self.dir.join(MODEL);
        let unreadable =
            |error: std::io::Error| Fault::environment(format!("cannot read `{}`: {error}", folder.display()));
        for entry in fs::read_dir(&folder).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
            if !self.index.files.contains_key(&format!("{MODEL}/{name}")) {
                let path = folder.join(&name);
                return Err(Fault {
                    tier: Tier::Environment,
                    message: format!("`{}` is no part of the export, and its tokenizer might read it", path.display()),
                    remedy: Some("remove it, or export the model again".to_string()),
                });
            }
        }
        Ok(())
    }
}

const EXPORT_AGAIN: &str = "export the model again with this monobloc";

fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

fn missing(path: &Path) -> Fault {
    Fault::environment(format!("`{}` is missing from the export", path.display()))
        .with_remedy("copy the whole folder again, or export the model again")
}

fn changed(path: &Path, expected: &str, found: &str) -> Fault {
    Fault::environment(format!("`{}` is not what was exported: expected {expected}, found {found}", path.display()))
        .with_remedy("copy the folder again, or export the model again")
}

/// The bytes of the index, once they were compared with its digest.
fn sealed_index(dir: &Path) -> Result<(Vec<u8>, Digest), Fault> {
    let (index, seal) = (dir.join(INDEX), dir.join(SEAL));
    if let Some(path) = [&index, &seal].into_iter().find(|path| !path.exists()) {
        return Err(missing(path));
    }
    let bytes = read_bytes(&index, INDEX_BYTES_MAX)?;
    let expected = read_text(&seal, 4096)?;
    let found = Digest::of(&bytes);
    if expected.trim_end() != found.to_string() {
        return Err(changed(&index, &format!("content {}", short(&expected)), &found.short()));
    }
    Ok((bytes, found))
}

fn parse_index(dir: &Path, bytes: &[u8]) -> Result<Index, Fault> {
    let place = dir.join(INDEX).display().to_string();
    let unreadable = |error: serde_json::Error| {
        Fault::input(format!("`{place}` is no index of an export: {error}")).with_remedy(EXPORT_AGAIN)
    };
    // Before anything else of it: another version has other fields.
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(unreadable)?;
    if let Some(format) = value["format"].as_u64().filter(|format| *format != u64::from(FORMAT)) {
        let by = value["monobloc"].as_str().unwrap_or("unknown");
        return Err(Fault::input(format!(
            "`{place}` has format {format}, written by monobloc {by}; this monobloc reads format {FORMAT}"
        ))
        .with_remedy(EXPORT_AGAIN));
    }
    let index: Index = serde_json::from_value(value).map_err(unreadable)?;
    let leaves = |path: &str| Path::new(path).components().any(|part| !matches!(part, Component::Normal(_)));
    if let Some(path) = index.files.keys().find(|path| leaves(path)) {
        return Err(
            Fault::input(format!("`{place}` names `{path}`, which is outside of its folder")).with_remedy(EXPORT_AGAIN)
        );
    }
    // The manifest reads records by path or by name. Other paths are looked up in `files` where they are read.
    let listed = |record: &str| record.starts_with("targets/") && index.files.contains_key(record);
    if let Some(TargetParts { name, record, .. }) = index.targets.iter().find(|parts| !listed(&parts.record)) {
        return Err(Fault::input(format!(
            "`{place}` takes the record of target `{name}` from `{record}`, expected a file of `targets/` that it lists"
        ))
        .with_remedy(EXPORT_AGAIN));
    }
    match index.targets.iter().find(|parts| !DEVICES.contains(&parts.devices)) {
        Some(TargetParts { name, devices, .. }) => {
            Err(Fault::input(format!("`{place}` gives target `{name}` {devices} devices, expected 1, 2, 4 or 8"))
                .with_remedy(EXPORT_AGAIN))
        }
        None => Ok(index),
    }
}

/// See [`Exported::manifest`].
fn manifest(dir: &Path, index: &Index) -> Result<Manifest, Fault> {
    let quoted = |text: &str| toml::Value::String(text.to_string()).to_string();
    let Index { name, precision, context_max, steps_per_launch, targets, .. } = index;
    let Index { sequences_max, chunk_max, cache_pages, .. } = index;
    let PrecisionNames { weights, cache, activations } = precision;
    let mut text = format!(
        "name = {}\n[model]\nsource = {}\n[precision]\nweights = {}\ncache = {}\nactivations = {}\n\
         [decode]\ncontext_max = {context_max}\nsteps_per_launch = {steps_per_launch}\n",
        quoted(name),
        quoted(&format!("path:{}", dir.join(MODEL).display())),
        quoted(weights),
        quoted(cache),
        quoted(activations),
    );
    for (key, value) in [("sequences_max", sequences_max), ("chunk_max", chunk_max), ("cache_pages", cache_pages)] {
        text.extend(value.map(|value| format!("{key} = {value}\n")));
    }
    if index.batch_invariant {
        text.push_str("batch_invariant = true\n");
    }
    for TargetParts { record, devices, .. } in targets {
        text.push_str(&format!("[[target]]\nrecord = {}\ndevices = {devices}\n", quoted(record)));
    }
    let manifest = Manifest::parse(&text, &dir.join(INDEX))?;
    // A record has the name of one device.
    match targets.iter().zip(&manifest.targets).find(|(parts, target)| parts.name != target.name) {
        Some((TargetParts { name, record, devices, .. }, target)) => Err(Fault::input(format!(
            "`{}` has a target `{name}`, expected `{}`, as `{record}` and its number of devices, {devices}, say",
            dir.join(INDEX).display(),
            target.name
        ))
        .with_remedy(EXPORT_AGAIN)),
        None => Ok(manifest),
    }
}
