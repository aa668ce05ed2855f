//! Owns exports as they are written: a folder with all that targets need to run a model, complete or not there at all.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::batch::{Memory, served};
use super::chain::{Chain, Host, NotMade};
use super::checks::{self, Checking, Checks};
use super::device_rows::Prefill;
use super::device_sampler::sampler_digest;
use super::device_steps::{By, StepsKernel};
use super::device_waves::prompt_digests;
use super::evaluate::ensure_checked;
use super::execute::{self, upload_pack};
use super::exported::{
    CompiledParts, Does, FORMAT, FileFacts, INDEX, Index, KernelParts, MODEL, PrecisionNames, SEAL, SamplerParts,
    ServedParts, StepsParts, TargetParts, cpu_kind,
};
use super::invariant;
use super::kernels::{self, KernelSet, Served};
use super::stages::{BuildContext, kernel_digests, write_pack};
use super::{Prepared, Serving, Workspace, prepare};
use crate::candidate::WaveKnobs;
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::defaults::rows::Room;
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::files::{self, folder_of};
use crate::ir::print::print;
use crate::manifest::Manifest;
use crate::model::source::{Resolved, Source, resolve};
use crate::pack::identity;
use crate::target::{TargetKind, TargetRecord};
use crate::tokenizer::{self, Copied};
use crate::validate::Validated;

/// Bytes that are copied at a time.
const PIECE_BYTES: usize = 8 << 20;

/// How the names of folders begin in which this process builds an export, beside the one that it will be.
pub fn temporary_prefix() -> String {
    format!(".monobloc-export-{}-", std::process::id())
}

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Digest of the index, which names every file by its digest.
    pub digest: Digest,
    pub files: usize,
    pub bytes: u64,
    pub targets: Vec<String>,
    /// Targets with kernels that were not checked on any kind of device.
    pub unchecked: Vec<String>,
}

/// Builds what is not built yet, checks what this machine has a device for, and writes all targets of the manifest into the new folder `out`.
/// `serving` sizes the steps of several rows. `None`: `stop` said so, and there is no folder.
///
/// # Errors
/// A folder that is there already, a target that cannot be built here, a full disk. Then there is no folder.
pub fn export(
    workspace: &Workspace,
    manifest: &Manifest,
    out: &Path,
    serving: &Serving,
    checking: Checking,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Written>, Fault> {
    let shown = out.display();
    if out.symlink_metadata().is_ok() {
        return Err(Fault::input(format!("`{shown}` exists"))
            .with_remedy("name a folder that is not there; nothing is overwritten"));
    }
    let prepared = manifest.targets.iter().map(|target| {
        let prepared = prepare(workspace, manifest, target)?;
        Ok::<Prepared, Fault>(Prepared { checking, ..prepared })
    });
    let prepared: Vec<Prepared> = prepared.collect::<Result<_, _>>()?;
    checking.warn(&workspace.report);
    let failed = |error: std::io::Error| unwritten(out, &error);
    // Asked for first, because the error of a temporary folder has a path that means nothing to the user.
    fs::metadata(folder_of(out).join(".")).map_err(failed)?;
    let beside = tempfile::Builder::new().prefix(&temporary_prefix()).tempdir_in(folder_of(out)).map_err(failed)?;
    // Below the temporary folder, which only its owner may read.
    let root = beside.path().join("export");
    fs::create_dir(&root).map_err(failed)?;
    let mut folder = Folder { root: root.clone(), files: BTreeMap::new(), stop };
    let Some(index) = fill(workspace, manifest, &prepared, serving, &mut folder)? else { return Ok(None) };
    let text = serde_json::to_string_pretty(&index)
        .map_err(|error| Fault::internal(format!("the index of an export is no JSON: {error}")))?;
    let digest = Digest::of(text.as_bytes());
    let (files, bytes) = (folder.files.len() + 2, folder.files.values().map(|file| file.bytes).sum());
    folder.put(INDEX, text.as_bytes())?;
    folder.put(SEAL, format!("{digest}\n").as_bytes())?;
    File::open(&root).and_then(|folder| folder.sync_all()).map_err(failed)?;
    if out.symlink_metadata().is_ok() {
        return Err(Fault::input(format!("`{shown}` was made by another process meanwhile")));
    }
    fs::rename(&root, out).map_err(failed)?;
    let unchecked = index.targets.iter().filter(|target| target.checked.is_empty());
    let unchecked = unchecked.map(|target| target.name.clone()).collect();
    let targets = index.targets.into_iter().map(|target| target.name).collect();
    Ok(Some(Written { digest, files, bytes, targets, unchecked }))
}

/// Writes every file but the index.
fn fill(
    workspace: &Workspace,
    manifest: &Manifest,
    prepared: &[Prepared],
    serving: &Serving,
    folder: &mut Folder<'_>,
) -> Result<Option<Index>, Fault> {
    let Some(first) = prepared.first() else { return Err(Fault::internal("a manifest without targets")) };
    let graph = &first.imported.graph;
    write_model(manifest, first, folder)?;
    let mut targets = vec![];
    for prepared in prepared {
        let stage = workspace.report.stage(&format!("export {}", prepared.target.name), "");
        let Some(parts) = write_target(workspace, prepared, serving, folder)? else { return Ok(None) };
        targets.push(parts);
        stage.done();
    }
    let precision = manifest.precision;
    Ok(Some(Index {
        format: FORMAT,
        monobloc: env!("CARGO_PKG_VERSION").to_string(),
        name: manifest.name.clone(),
        model: manifest.model_name(),
        precision: PrecisionNames {
            weights: precision.weights.to_string(),
            cache: precision.cache.to_string(),
            activations: precision.wire.to_string(),
        },
        vocab: graph.vocab,
        eos: graph.eos.clone(),
        bos: graph.bos,
        context_max: manifest.decode.context_max,
        steps_per_launch: manifest.decode.steps_per_launch,
        sequences_max: manifest.decode.sequences_max,
        chunk_max: manifest.decode.chunk_max,
        cache_pages: manifest.decode.cache_pages,
        batch_invariant: manifest.decode.batch_invariant,
        parameters: graph.parameter_count(),
        unchecked: first.checking == Checking::Skipped,
        targets,
        files: folder.files.clone(),
    }))
}

/// The config, and what the tokenizer reads.
fn write_model(manifest: &Manifest, prepared: &Prepared, folder: &mut Folder<'_>) -> Result<(), Fault> {
    folder.put(&format!("{MODEL}/config.json"), prepared.imported.config_text.as_bytes())?;
    let source = Source::parse(&manifest.source, &manifest.revision, manifest.seed)?;
    let Resolved::Checkpoint { dir, .. } = resolve(&source, &manifest.base_dir, &mut |_| {})? else { return Ok(()) };
    for (name, content) in tokenizer::files_to_copy(&dir)? {
        let name = format!("{MODEL}/{name}");
        match content {
            Copied::File(path) => folder.copy(&name, &path)?,
            Copied::Bytes(bytes) => folder.put(&name, &bytes)?,
        }
    }
    for (name, path) in tokenizer::further_templates(&dir)? {
        folder.copy(&format!("{MODEL}/{}/{name}.jinja", tokenizer::TEMPLATES), &path)?;
    }
    Ok(())
}

/// Schedules, kernels and weights of one target. `None`: the user asked to stop.
fn write_target(
    workspace: &Workspace,
    prepared: &Prepared,
    serving: &Serving,
    folder: &mut Folder<'_>,
) -> Result<Option<TargetParts>, Fault> {
    let Prepared { manifest, target, candidate, validated, .. } = prepared;
    let name = &target.name;
    let host = Host::new(workspace);
    let chain = prepared.chain(workspace, &host);
    let record = format!("targets/{name}.toml");
    let written = TargetRecord::of_one_device(target.clone(), manifest.measured(target));
    folder.put(&record, written.to_toml().as_bytes())?;
    let mut kernels = vec![];
    let mut on = OnDevice::of(prepared, &chain)?;
    let served = match target.kind {
        TargetKind::Cpu => None,
        TargetKind::Cuda => write_served(workspace, prepared, &mut on, serving, folder)?,
    };
    match target.kind {
        TargetKind::Cpu => {
            let text = prepared.text_on_cpu(&chain)?;
            // It was checked with the steps of several rows, unless that is left out.
            let several = prepared.batched(workspace, serving)?;
            for (does, rows) in [(Does::Text, text.validated(target)?), (Does::Batch, several.validated())] {
                same_weights(validated, rows)?;
                let kernel = folder.kernel(name, does, rows, None)?;
                on.record(kernel.code());
                kernels.push(kernel);
            }
        }
        TargetKind::Cuda if invariant::is_asked(manifest, target) => {
            kernels = alike_kernels(&mut on, validated, folder)?;
        }
        TargetKind::Cuda => kernels = text_kernels(workspace, prepared, &mut on, folder)?,
    }
    let checked = on.recorded();
    let layout = Digest::from_bytes(identity(validated.schedule()));
    let pack = format!("weights-{}.pack", layout.short());
    if !folder.files.contains_key(&pack) {
        let written = match chain.stored_pack()? {
            Some(entry) => {
                let mut at = 0;
                folder.pieces(&pack, entry.len(), |buffer| {
                    entry.read_at(at, buffer)?;
                    at += buffer.len() as u64;
                    Ok(())
                })?
            }
            None => folder.with_file(&pack, |file| write_pack(&chain.context, validated, file))?,
        };
        if !written {
            return Ok(None);
        }
    }
    let (candidate, pack_identity) = (candidate.to_string(), layout.to_string());
    let (name, devices) = (name.clone(), target.devices);
    Ok(Some(TargetParts { name, record, devices, candidate, pack, pack_identity, kernels, served, checked }))
}

/// What checks the kernels of a target before they are written, and remembers which were.
struct OnDevice<'a> {
    chain: &'a Chain<'a>,
    /// What they are checked on; `None`: there is no such device here, or nothing is to be checked.
    kind: Option<String>,
    /// The device of a CUDA target, with those that run its model together with it.
    device: Option<(DeviceIdentity, Device)>,
    /// Files of the export, by name.
    checked: Vec<String>,
}

impl<'a> OnDevice<'a> {
    fn of(prepared: &Prepared, chain: &'a Chain<'a>) -> Result<OnDevice<'a>, Fault> {
        let none = OnDevice { chain, kind: None, device: None, checked: vec![] };
        if prepared.checking == Checking::Skipped {
            return Ok(none);
        }
        let target = &prepared.target;
        match chain.host.device(target) {
            Ok(None) => Ok(OnDevice { kind: Some(cpu_kind()), ..none }),
            Ok(Some(found)) => {
                let device = Some((found.clone(), execute::open(found, target)?));
                Ok(OnDevice { kind: Some(found.name.clone()), device, ..none })
            }
            Err(NotMade::NoDevice { reason, .. }) => {
                chain.context.workspace.report.note(&format!(
                    "{}: its kernels are not checked ({reason}): the first run of the export on a device does that",
                    target.name
                ));
                Ok(none)
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Checks the decode kernel, whose cubin is written as `file`.
    fn ensure_decode(&mut self, file: &str) -> Result<(), Fault> {
        if self.kind.is_some() {
            ensure_checked(self.chain)?;
        }
        self.record(file);
        Ok(())
    }

    /// Checks the kernels of a set, whose cubins are written as `files`.
    fn ensure(&mut self, set: &KernelSet, files: &[String]) -> Result<(), Fault> {
        if let Some((found, device)) = &self.device {
            let chain = self.chain;
            let pack = || Ok(chain.pack()?);
            Checks::of(chain, found, &pack)?.ensure(set, &mut || {
                let pack = upload_pack(device, set.validated(), &chain.pack()?)?;
                set.load(device, chain.context.target, checks::STEPS_MAX, &pack, None)
            })?;
        }
        files.iter().for_each(|file| self.record(file));
        Ok(())
    }

    fn record(&mut self, file: &str) {
        if self.kind.is_some() {
            self.checked.push(file.to_string());
        }
    }

    fn recorded(self) -> BTreeMap<String, Vec<String>> {
        self.kind.map(|kind| (kind, self.checked)).into_iter().collect()
    }
}

/// The kernels that decode one text on a device, each the fastest for what it does.
fn text_kernels(
    workspace: &Workspace,
    prepared: &Prepared,
    on: &mut OnDevice<'_>,
    folder: &mut Folder<'_>,
) -> Result<Vec<KernelParts>, Fault> {
    let Prepared { target, validated, .. } = prepared;
    let chain = on.chain;
    let (name, mut kernels) = (&target.name, vec![]);
    let cubin = chain.cubin()?.ok_or_else(|| Fault::internal("a target with a kernel has no cubin"))?;
    let compiled = compiled_of(kernel_digests(validated, target)?, &cubin.nvrtc);
    kernels.push(folder.kernel(name, Does::Text, validated, Some((compiled, &cubin.bytes)))?);
    on.ensure_decode(kernels[0].code())?;
    let set = match Prefill::made(chain) {
        Ok(set) => set,
        Err(reason) => {
            workspace.report.note(&format!("{name}: prompts are read one token a step: {}", reason.message));
            return Ok(kernels);
        }
    };
    let prompt = set.validated();
    same_weights(validated, prompt)?;
    let of_waves = match set.prompts() {
        Some(cubins) => prompt_digests(target, prompt, &cubins.knobs)?,
        None => vec![],
    };
    let mut written = vec![];
    for kernel in set.all() {
        let (does, digests) = match kernel.does {
            kernels::Does::Steps { .. } => (Does::Prompt, kernel_digests(prompt, target)?),
            of @ (kernels::Does::Chunk | kernels::Does::Tail) => (Does::of_prompts(of), digests_of(&of_waves, of)?),
            kernels::Does::Sampler => return Err(Fault::internal("a sampler for one text")),
        };
        let compiled = compiled_of(digests, &kernel.code.nvrtc);
        let parts = folder.kernel(name, does, prompt, Some((compiled, &kernel.code.bytes)))?;
        written.push(KernelParts { knobs: knobs_text(&kernel.knobs), ..parts });
    }
    on.ensure(&set, &written.iter().map(|kernel| kernel.code().to_string()).collect::<Vec<_>>())?;
    kernels.extend(written);
    Ok(kernels)
}

/// The digests of the kernel that does this.
fn digests_of(all: &[(kernels::Does, [Digest; 2])], does: kernels::Does) -> Result<[Digest; 2], Fault> {
    let found = all.iter().find(|(of, _)| *of == does).map(|(_, digests)| *digests);
    found.ok_or_else(|| Fault::internal(format!("no plan of the kernel `{does}`")))
}

/// The kernels of a server on a device that has nothing but the model in its memory. `None`: there are none, and the user is told why.
fn write_served(
    workspace: &Workspace,
    prepared: &Prepared,
    on: &mut OnDevice<'_>,
    serving: &Serving,
    folder: &mut Folder<'_>,
) -> Result<Option<ServedParts>, Fault> {
    let Prepared { target, validated, .. } = prepared;
    let memory = Memory::beside(validated, target.spec.memory_bytes);
    prepared.refuse_sizes(on.chain, serving, memory)?;
    let Served { running_max, set } = match served(on.chain, &serving.on_device(), memory) {
        Ok(served) => served,
        Err(fault) if fault.tier == Tier::Input => {
            workspace
                .report
                .note(&format!("{}: the export has no kernels for `serve`: {}", target.name, fault.message));
            return Ok(None);
        }
        Err(fault) => return Err(fault),
    };
    let sampler = set.get(kernels::Does::Sampler).ok_or_else(|| Fault::internal("a server without a sampler"))?;
    let cubin = format!("{}/sampler.cubin", target.name);
    folder.put(&cubin, &sampler.code.bytes)?;
    let mut files = vec![cubin.clone()];
    let source = sampler_digest(target)?.to_string();
    let sampler = SamplerParts { cubin, source, nvrtc: sampler.code.nvrtc.clone() };
    let (mut steps, mut ragged, mut prompts) = (vec![], None, vec![]);
    let mut schedules = vec![];
    for (of, kernel) in set.steps() {
        same_weights(validated, &of.validated)?;
        let digests = match set.is_alike() {
            true => invariant::digests(target, &of.validated, of.rows)?,
            false => of.digests(target)?,
        };
        let compiled = compiled_of(digests, &kernel.code.nvrtc);
        let parts = folder.steps(&target.name, &of, compiled, &kernel.code.bytes, &mut schedules)?;
        files.push(parts.compiled.cubin.clone());
        if of.by == By::Splits { ragged = Some(parts) } else { steps.push(parts) }
    }
    // Kernels of waves for prompts are those of the first kernel for several rows.
    let mut prompt_knobs = String::new();
    if let (Some(cubins), Some(first)) = (set.prompts(), set.first_of_several()) {
        prompt_knobs = knobs_text(&cubins.knobs);
        for (does, digests) in prompt_digests(target, &first.validated, &cubins.knobs)? {
            let kernel = set.get(does).ok_or_else(|| Fault::internal(format!("no kernel `{does}`")))?;
            let cubin = format!("{}/serve-{}.cubin", target.name, Does::of_prompts(does).name());
            folder.put(&cubin, &kernel.code.bytes)?;
            files.push(cubin.clone());
            prompts.push(CompiledParts { cubin, ..compiled_of(digests, &kernel.code.nvrtc) });
        }
    }
    on.ensure(&set, &files)?;
    Ok(Some(ServedParts { running_max, sampler, steps, ragged, prompts, prompt_knobs }))
}

/// The kernels that add up in one order.
fn alike_kernels(
    on: &mut OnDevice<'_>,
    one_row: &Validated,
    folder: &mut Folder<'_>,
) -> Result<Vec<KernelParts>, Fault> {
    let BuildContext { manifest, target, .. } = on.chain.context;
    let positions = u64::from(manifest.decode.context_max);
    let made = invariant::make(on.chain, Room { rows: 0, sequences: 1, positions })?;
    same_weights(one_row, made.validated())?;
    let mut written = vec![];
    for (StepsKernel { validated, rows, .. }, kernel) in made.steps() {
        let does = [Does::Steps32, Does::Steps64].into_iter().find(|does| does.alike_rows() == Some(rows));
        let does = does.ok_or_else(|| Fault::internal(format!("an export has no place for {rows} rows")))?;
        let compiled = compiled_of(invariant::digests(target, &validated, rows)?, &kernel.code.nvrtc);
        written.push(folder.kernel(&target.name, does, &validated, Some((compiled, &kernel.code.bytes)))?);
    }
    on.ensure(&made, &written.iter().map(|kernel| kernel.code().to_string()).collect::<Vec<_>>())?;
    Ok(written)
}

/// Knobs of a wave kernel as the index has them: nothing where every choice is left to the rules.
fn knobs_text(knobs: &WaveKnobs) -> String {
    if knobs.is_default() { String::new() } else { knobs.to_string() }
}

/// The parts of a kernel, from the digests of its source and of what it walks.
fn compiled_of(digests: [Digest; 2], nvrtc: &str) -> CompiledParts {
    let [source, queues] = digests.map(|digest| digest.to_string());
    CompiledParts { cubin: String::new(), source, queues, nvrtc: nvrtc.to_string() }
}

fn same_weights(one: &Validated, other: &Validated) -> Result<(), Fault> {
    match identity(one.schedule()) == identity(other.schedule()) {
        true => Ok(()),
        false => Err(Fault::internal("two kernels of one model read different packs")),
    }
}

/// A folder that is being written.
struct Folder<'a> {
    root: PathBuf,
    files: BTreeMap<String, FileFacts>,
    stop: &'a dyn Fn() -> bool,
}

impl Folder<'_> {
    fn create(&self, path: &str) -> Result<(File, PathBuf), Fault> {
        let place = self.root.join(path);
        let file = fs::create_dir_all(folder_of(&place)).and_then(|()| File::create_new(&place));
        Ok((file.map_err(|error| unwritten(&place, &error))?, place))
    }

    /// Remembers a file once its bytes are on the disk.
    fn keep(&mut self, path: &str, file: &File, bytes: u64, digest: Digest) -> Result<(), Fault> {
        file.sync_all().map_err(|error| unwritten(&self.root.join(path), &error))?;
        self.files.insert(path.to_string(), FileFacts { bytes, digest: digest.to_string() });
        Ok(())
    }

    fn put(&mut self, path: &str, bytes: &[u8]) -> Result<(), Fault> {
        let (mut file, place) = self.create(path)?;
        file.write_all(bytes).map_err(|error| unwritten(&place, &error))?;
        self.keep(path, &file, bytes.len() as u64, Digest::of(bytes))
    }

    /// Copies a small file of the checkpoint.
    fn copy(&mut self, path: &str, from: &Path) -> Result<(), Fault> {
        let mut bytes = vec![];
        files::open(from)?
            .read_to_end(&mut bytes)
            .map_err(|error| Fault::environment(format!("cannot read `{}`: {error}", from.display())))?;
        self.put(path, &bytes)
    }

    fn kernel(
        &mut self,
        target: &str,
        does: Does,
        validated: &Validated,
        compiled: Option<(CompiledParts, &[u8])>,
    ) -> Result<KernelParts, Fault> {
        let place = |ending: &str| format!("{target}/{}.{ending}", does.name());
        let schedule = place("mkir");
        self.put(&schedule, print(validated.schedule()).as_bytes())?;
        let compiled = match compiled {
            None => None,
            Some((parts, bytes)) => {
                let cubin = place("cubin");
                self.put(&cubin, bytes)?;
                Some(CompiledParts { cubin, ..parts })
            }
        };
        Ok(KernelParts { does, schedule, compiled, knobs: String::new() })
    }

    /// A kernel of a server. `schedules` are those that were written for it, and their paths: several kernels may have the same.
    fn steps(
        &mut self,
        target: &str,
        kernel: &StepsKernel,
        compiled: CompiledParts,
        bytes: &[u8],
        schedules: &mut Vec<(Arc<Validated>, String)>,
    ) -> Result<StepsParts, Fault> {
        let &StepsKernel { ref validated, rows, by, knobs } = kernel;
        let name = if by == By::Splits { "-splits" } else { "" };
        let place = |ending: &str| format!("{target}/serve-{rows}{name}.{ending}");
        let schedule = match schedules.iter().find(|(of, _)| Arc::ptr_eq(of, validated)) {
            Some((_, path)) => path.clone(),
            None => {
                let path = place("mkir");
                self.put(&path, print(validated.schedule()).as_bytes())?;
                schedules.push((Arc::clone(validated), path.clone()));
                path
            }
        };
        let cubin = place("cubin");
        self.put(&cubin, bytes)?;
        Ok(StepsParts { rows, by, schedule, compiled: CompiledParts { cubin, ..compiled }, knobs: knobs_text(&knobs) })
    }

    /// Writes a file of `length` bytes, which `fill` gives one after another. False: the user asked to stop.
    fn pieces(
        &mut self,
        path: &str,
        length: u64,
        mut fill: impl FnMut(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<bool, Fault> {
        let (mut file, place) = self.create(path)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; PIECE_BYTES];
        let mut left = length;
        while left > 0 {
            if (self.stop)() {
                return Ok(false);
            }
            let piece = &mut buffer[..left.min(PIECE_BYTES as u64) as usize];
            fill(piece)?;
            hasher.update_rayon(piece);
            file.write_all(piece).map_err(|error| unwritten(&place, &error))?;
            left -= piece.len() as u64;
        }
        self.keep(path, &file, length, Digest::from(hasher.finalize()))?;
        Ok(true)
    }

    /// Writes a file by a function that tells the digest of what it wrote. False: the user asked to stop.
    fn with_file(&mut self, path: &str, write: impl FnOnce(&mut File) -> Result<Digest, Fault>) -> Result<bool, Fault> {
        let (mut file, place) = self.create(path)?;
        let digest = write(&mut file)?;
        let bytes = file.metadata().map_err(|error| unwritten(&place, &error))?.len();
        self.keep(path, &file, bytes, digest)?;
        Ok(!(self.stop)())
    }
}

fn unwritten(path: &Path, error: &std::io::Error) -> Fault {
    let remedy = match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => "name a folder with `--out` whose parent is a folder",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "name a folder that you may write to with `--out`"
        }
        _ => "free space on that disk, or name a folder on another one with `--out`",
    };
    Fault::environment(format!("cannot write `{}`: {error}", path.display())).with_remedy(remedy)
}
