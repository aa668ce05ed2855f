//! Owns the stages that need no execution: import, schedule, source, cubin and pack, each through the cache.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::{Mmap, MmapMut};

use crate::cache::{CacheError, Entry, Outcome};
use crate::candidate::{Candidate, Infeasible, KNOB_NAMES, WAVE_KNOBS, WaveKnobs};
use crate::codegen::KernelSource;
use crate::codegen::abi::Queues;
use crate::codegen::emit::{Trace, emit};
use crate::defaults::rows::cpu_candidate;
use crate::digest::{Digest, key};
use crate::error::{Fault, Tier};
use crate::files;
use crate::gguf::{self, Header};
use crate::interp::Pack;
use crate::ir::layout::pack_bytes;
use crate::ir::parse::parse;
use crate::ir::print::print;
use crate::ir::program::Program;
use crate::ir::schedule::Schedule;
use crate::lower::{Batch, LayerOp, graph_of, lower, lower_alone, lower_batch};
use crate::manifest::{Manifest, SearchKernel};
use crate::model::config::{Imported, graph_text, import, import_config_only};
use crate::model::graph::ModelGraph;
use crate::model::rounding::round_matrices;
use crate::model::source::{Event, Resolved, Source, resolve};
use crate::pack::{fill, pack_pieces};
use crate::schedule::schedule;
use crate::search::Space;
use crate::target::Target;
use crate::text::{counted, one_of};
use crate::validate::{Validated, same, validate};

use super::Workspace;
use super::chain::NotMade;
use super::keys::{self, CampaignKey, Hardware, ImportKey, Keyed, PackKey, ScheduleKey, SourceKey, WeightsId};
use super::stored;

/// A config is kilobytes; the importer has the same bound.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// A header that the importer accepted has at most this many bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;

impl Workspace {
    /// The entry under `keyed`; `build` makes it where there is none, as a stage that the report shows under `title`.
    pub(super) fn stage<E: From<Fault> + From<CacheError>>(
        &self,
        keyed: &Keyed,
        subject: &str,
        title: &str,
        detail: &str,
        build: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<(Entry, Outcome), E> {
        self.run_stage(keyed, subject, title, detail, |keyed| {
            self.cache.get_or_build(keyed.stage, &keyed.key, &keyed.why, || {
                let bytes = build()?;
                self.attest(keyed, Digest::of(&bytes))?;
                Ok(bytes)
            })
        })
    }

    /// Looks an entry up, and otherwise runs `make`, which takes the lock of the entry and builds it.
    pub(super) fn run_stage<E: From<Fault>>(
        &self,
        keyed: &Keyed,
        subject: &str,
        title: &str,
        detail: &str,
        make: impl FnOnce(&Keyed) -> Result<(Entry, Outcome), E>,
    ) -> Result<(Entry, Outcome), E> {
        if let Some(entry) = self.trusted(keyed)? {
            self.report.cached(title);
            self.point(keyed, subject)?;
            return Ok((entry, Outcome::Cached));
        }
        let stage = self.report.stage(title, detail);
        let (entry, outcome) = make(keyed)?;
        match outcome {
            Outcome::Built => stage.done(),
            Outcome::Cached | Outcome::BuiltElsewhere => {
                self.linked(keyed, &entry)?;
                drop(stage);
                self.report.cached(title);
            }
        }
        self.point(keyed, subject)?;
        Ok((entry, outcome))
    }

    /// Remembers what the subject was built from, for `explain`. Written only when it changes.
    pub(super) fn point(&self, keyed: &Keyed, subject: &str) -> Result<(), Fault> {
        if self.cache.latest_why(keyed.stage, subject).is_none_or(|(key, _)| key != keyed.key) {
            self.cache.set_latest(keyed.stage, subject, &keyed.key)?;
        }
        Ok(())
    }
}

/// A model that was imported, with the names it has in keys.
pub(super) struct Model {
    pub imported: Imported,
    /// The commit of a model from the hub.
    pub commit: Option<String>,
    pub keyed: Keyed,
    /// Digest of the graph's text: what the next stage keys on.
    pub graph: Digest,
    pub graph_text: String,
    /// The op that is looked at alone; `None`: the whole model.
    pub op: Option<LayerOp>,
}

impl Model {
    /// The same model, of which `op` is looked at alone on a target.
    pub fn alone(mut self, op: LayerOp, target: &Target) -> Model {
        self.graph = graph_alone(self.graph, op, target);
        graph_of(op, &mut self.imported.graph, target.sms());
        Model { op: Some(op), ..self }
    }
}

/// Names the graph of a model of which `op` is looked at alone on a target.
pub(super) fn graph_alone(graph: Digest, op: LayerOp, target: &Target) -> Digest {
    Digest::of(format!("{graph} {} alone, {} SMs", op.name(), target.sms()).as_bytes())
}

/// Finds the source and imports it. Headers only, so it is done on every build; the stage is its result.
pub(super) fn load_model(workspace: &Workspace, manifest: &Manifest) -> Result<Model, Fault> {
    let source = Source::parse(&manifest.source, &manifest.revision, manifest.seed)?;
    let resolved = download(workspace, &source, manifest)?;
    let (mut imported, keyed, commit) = match resolved {
        Resolved::Checkpoint { dir, commit } => {
            let imported = import(&dir)?;
            let generation = dir.join("generation_config.json");
            let generation =
                if generation.exists() { Some(read_bounded(&generation, CONFIG_BYTES_MAX)?) } else { None };
            let headers = imported
                .weights
                .files()
                .iter()
                .map(|(path, bytes)| Ok((file_name(path), *bytes, header_digest(path)?)))
                .collect::<Result<Vec<_>, Fault>>()?;
            let keyed = ImportKey {
                code: keys::code(keys::IMPORT),
                synthetic: false,
                config: imported.config_text.as_bytes(),
                generation_config: generation.as_deref(),
                headers: &headers,
                formats: &manifest.formats.key_text(),
            }
            .keyed();
            (imported, keyed, commit)
        }
        Resolved::Synthetic { config, seed } => {
            let text = files::read_text(&config, CONFIG_BYTES_MAX)?;
            let imported = import_config_only(&text, seed)?;
            let keyed = ImportKey {
                code: keys::code(keys::IMPORT),
                synthetic: true,
                config: text.as_bytes(),
                generation_config: None,
                headers: &[],
                formats: &manifest.formats.key_text(),
            }
            .keyed();
            (imported, keyed, None)
        }
    };
    round_matrices(&mut imported.graph, &mut imported.weights, &manifest.formats)
        .map_err(|error| Fault::input(error.to_string()))?;
    let graph_text = graph_text(&imported.graph);
    let (positions_max, context_max) = (imported.graph.positions_max, manifest.decode.context_max);
    if context_max > positions_max {
        // If the config has more positions, a note says why the model has fewer.
        let why = imported.notes.first().map_or("the positions that the model was made for", String::as_str);
        let message = format!("`decode.context_max` is {context_max}, expected at most {positions_max}: {why}");
        return Err(Fault::input(message).with_remedy(format!("set `decode.context_max` to {positions_max} or less")));
    }
    Ok(Model { imported, commit, keyed, graph: Digest::of(graph_text.as_bytes()), graph_text, op: None })
}

/// The folder of the manifest's checkpoint; `None`: its weights are synthetic.
pub(super) fn checkpoint_folder(workspace: &Workspace, manifest: &Manifest) -> Result<Option<PathBuf>, Fault> {
    let source = Source::parse(&manifest.source, &manifest.revision, manifest.seed)?;
    Ok(match download(workspace, &source, manifest)? {
        Resolved::Checkpoint { dir, .. } => Some(dir),
        Resolved::Synthetic { .. } => None,
    })
}

/// Makes the source local; a download shows its progress.
fn download(workspace: &Workspace, source: &Source, manifest: &Manifest) -> Result<Resolved, Fault> {
    let mut progress = None;
    let resolved = resolve(source, &manifest.base_dir, &mut |event| match event {
        Event::File { name, bytes } => {
            workspace.report.note(&format!("downloading {name}, {bytes} bytes"));
            progress = Some(workspace.report.progress(&format!("bytes of {name}"), bytes));
        }
        Event::Received { bytes } => {
            if let Some(progress) = &progress {
                progress.inc(bytes);
            }
        }
        Event::Done { .. } => progress = None,
        Event::Waiting { name } => workspace.report.note(&format!("waiting for another process to download {name}")),
        Event::Busy { status, wait } => {
            workspace
                .report
                .note(&format!("the hub is busy (status {status}): asking again in {:.1} s", wait.as_secs_f64()));
        }
    })?;
    Ok(resolved)
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn unreadable(path: &Path, error: impl std::fmt::Display) -> Fault {
    Fault::environment(format!("cannot read `{}`: {error}", path.display()))
}

fn read_bounded(path: &Path, bytes_max: u64) -> Result<Vec<u8>, Fault> {
    let mut bytes = vec![];
    let read = files::open(path)?.take(bytes_max).read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|error| unreadable(path, error))
}

/// Digest of the header of a weight file that the importer has accepted.
fn header_digest(path: &Path) -> Result<Digest, Fault> {
    let mut file = files::open(path)?;
    let length = if gguf::is_named(path) {
        Header::read(path).map_err(|faults| unreadable(path, &faults[0]))?.bytes
    } else {
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|error| unreadable(path, error))?;
        u64::from_le_bytes(length).min(HEADER_BYTES_MAX)
    };
    let mut header = vec![];
    file.take(length).read_to_end(&mut header).map_err(|error| unreadable(path, error))?;
    Ok(Digest::of(&header))
}

/// One target of a manifest, with the model that all targets share.
#[derive(Clone, Copy)]
pub(super) struct BuildContext<'a> {
    pub workspace: &'a Workspace,
    pub manifest: &'a Manifest,
    pub target: &'a Target,
    pub imported: &'a Imported,
    pub graph: Digest,
    /// As [`Model`] has it.
    pub op: Option<LayerOp>,
    /// Whether it is the draft of the manifest's model.
    pub is_draft: bool,
    /// The manifest's candidate for the target. It was validated when the manifest was read.
    pub knobs: Option<&'a str>,
}

impl<'a> BuildContext<'a> {
    /// # Errors
    /// A `candidate` of the manifest that is none.
    pub fn new(
        workspace: &'a Workspace,
        manifest: &'a Manifest,
        target: &'a Target,
        model: &'a Model,
    ) -> Result<Self, Fault> {
        let Model { imported, graph, op, .. } = model;
        let context = BuildContext { op: *op, ..BuildContext::of(workspace, manifest, target, imported, *graph) };
        let refused = |reason: &str, remedy: String| {
            Err(Fault::input(format!("the `candidate` of target `{}`: {reason}", target.name)).with_remedy(remedy))
        };
        let own = KNOB_NAMES.into_iter().filter(|name| WAVE_KNOBS.iter().all(|knob| knob.name != *name));
        match context.knobs.map(|knobs| Candidate::parse(knobs, &context.default_candidate())) {
            Some(Err(reason)) => refused(&reason, format!("the knobs are {}", one_of(own.collect::<Vec<_>>()))),
            Some(Ok(candidate)) if !candidate.waves.is_default() => refused(
                &format!("`{}` is of wave kernels", candidate.waves),
                "leave it out: a search with `kernel` in `[search]` finds knobs of wave kernels".to_string(),
            ),
            _ => Ok(context),
        }
    }

    /// The whole model, where [`BuildContext::new`] found nothing wrong before.
    pub fn of(
        workspace: &'a Workspace,
        manifest: &'a Manifest,
        target: &'a Target,
        imported: &'a Imported,
        graph: Digest,
    ) -> Self {
        let knobs = manifest.candidates.get(&target.name).map(String::as_str);
        BuildContext { workspace, manifest, target, imported, graph, op: None, is_draft: false, knobs }
    }

    /// The draft of the manifest's model, whose knobs are not its own.
    pub fn of_draft(
        workspace: &'a Workspace,
        manifest: &'a Manifest,
        target: &'a Target,
        draft: &'a Imported,
        graph: Digest,
    ) -> Self {
        let own = BuildContext::of(workspace, manifest, target, draft, graph);
        BuildContext { is_draft: true, knobs: None, ..own }
    }

    /// What the user calls this: the manifest by its folder and name, and the target.
    pub fn subject(&self) -> String {
        let subject = subject(self.manifest, &self.target.name);
        let part = if self.is_draft { Some("draft") } else { self.op.map(LayerOp::name) };
        part.map_or(subject.clone(), |part| format!("{subject} {part}"))
    }

    pub fn title(&self, stage: &str) -> String {
        let part = if self.is_draft { " draft" } else { "" };
        format!("{stage} {}{part}", self.target.name)
    }

    /// The candidate to build: the best one of a search, else that of the manifest, else the default.
    pub fn candidate(&self) -> Candidate {
        let default = self.default_candidate();
        let tuned = || {
            let tuned = Candidate::parse(&self.tuned_text(SearchKernel::Decode)?, &default).ok()?;
            // Another version of the code may not take it any more.
            let fits = self.lower(&tuned).and_then(|program| schedule(program, self.target, &tuned)).is_ok();
            (tuned != default && fits).then_some(tuned)
        };
        tuned().unwrap_or(default)
    }

    /// Where a search begins, and what it compares with: the default with what the manifest says otherwise.
    pub fn default_candidate(&self) -> Candidate {
        let default = Candidate::default_for(&self.imported.graph, self.target, self.manifest.precision)
            .for_context(self.manifest.decode.context_max);
        self.knobs.and_then(|knobs| Candidate::parse(knobs, &default).ok()).unwrap_or(default)
    }

    /// The text that a search of a kernel left for builds.
    fn tuned_text(&self, kernel: SearchKernel) -> Option<String> {
        let cache = &self.workspace.cache;
        let (key, _) = cache.latest_why(keys::TUNED, &self.tuned_subject(kernel))?;
        String::from_utf8(cache.get(keys::TUNED, &key).ok()??.bytes().ok()?.to_vec()).ok()
    }

    /// Knobs of a wave kernel that a search found; without one, every choice is left to the rules. The plan may refuse them: `chosen_knobs` asks it.
    pub fn tuned_waves(&self, kernel: SearchKernel) -> WaveKnobs {
        let found = self.tuned_text(kernel).filter(|_| kernel != SearchKernel::Decode);
        found.and_then(|text| WaveKnobs::parse(&text).ok()).unwrap_or_default()
    }

    /// The kernel that a search of the manifest turns. An op alone is one of the decode kernel.
    pub fn searched(&self) -> SearchKernel {
        if self.op.is_some() { SearchKernel::Decode } else { self.manifest.search.kernel }
    }

    /// Where that search begins. A wave kernel is derived from the schedule of the candidate that is built.
    pub fn search_default(&self) -> Candidate {
        match self.searched() {
            SearchKernel::Decode => self.default_candidate(),
            SearchKernel::Wave { .. } | SearchKernel::Chunk => self.candidate(),
        }
    }

    /// What builds take of that kernel.
    pub fn search_built(&self) -> Candidate {
        let kernel = self.searched();
        Candidate { waves: self.tuned_waves(kernel), ..self.candidate() }
    }

    pub fn schedule_key(&self, candidate: &Candidate) -> Keyed {
        ScheduleKey {
            code: keys::code(keys::SCHEDULE),
            graph: self.graph,
            precision: self.manifest.precision,
            context_max: self.manifest.decode.context_max,
            candidate,
            target: self.target,
            batch: None,
        }
        .keyed()
    }

    /// The key of a search result. It has neither hardware nor code, because every candidate is proven and checked again.
    pub fn tuned_subject(&self, kernel: SearchKernel) -> String {
        let Manifest { precision, decode, .. } = self.manifest;
        let begun = self.knobs.map(|_| format!(" from {}", self.default_candidate())).unwrap_or_default();
        let of = match kernel {
            SearchKernel::Decode => String::new(),
            kernel => format!(" {kernel}"),
        };
        format!("{} {precision:?} {} {}{begun}{of}", self.graph, decode.context_max, self.target.name)
    }

    /// A search with this budget of trials and minutes that has ended.
    pub fn searched_subject(&self, (trials, minutes): (u32, f64)) -> String {
        let search = &self.manifest.search;
        let subject = self.tuned_subject(self.searched());
        format!("{subject} searched {trials} {minutes} {} {}", search.seed, search.margin)
    }

    /// Names a search of this model on this target and hardware.
    ///
    /// # Errors
    /// Those of [`BuildContext::weights_id`].
    pub fn campaign(&self, hardware: &Hardware) -> Result<Digest, Fault> {
        let Manifest { precision, decode, search, .. } = self.manifest;
        let key = CampaignKey {
            code: keys::code_of_all(),
            graph: self.graph,
            weights: &self.weights_id()?,
            precision: *precision,
            context_max: decode.context_max,
            positions: &decode.time_positions,
            steps_per_launch: decode.steps_per_launch,
            target: self.target,
            hardware,
            space: Space::digest(),
            seed: search.seed,
            kernel: self.searched().to_string(),
            begun: &self.search_default(),
        };
        Ok(key.digest())
    }

    pub fn source_key(&self, schedule: Digest) -> Keyed {
        SourceKey { code: keys::code(keys::SOURCE), schedule, target: self.target }.keyed()
    }

    pub fn pack_key(&self, candidate: &Candidate, weights: &WeightsId) -> Keyed {
        let Manifest { precision, decode, .. } = self.manifest;
        let (precision, context_max) = (*precision, decode.context_max);
        let (code, unit_rows) = (keys::code(keys::PACK), candidate.unit_rows);
        PackKey { code, graph: self.graph, precision, context_max, unit_rows, weights }.keyed()
    }

    /// The program of a candidate. Named after the family: a manifest's name is a label, and no part of any key.
    pub fn lower(&self, candidate: &Candidate) -> Result<Program, Infeasible> {
        let Manifest { precision, decode, .. } = self.manifest;
        let graph: &ModelGraph = &self.imported.graph;
        match self.op {
            None => lower(graph, &graph.family, *precision, decode.context_max, candidate),
            Some(op) => lower_alone(graph, &graph.family, *precision, decode.context_max, candidate, op),
        }
    }

    /// Identity of the weights. The first call for a checkpoint reads every byte of it, later ones read none.
    pub fn weights_id(&self) -> Result<WeightsId, Fault> {
        weights_id(self.workspace, self.imported)
    }
}

pub(super) fn subject(manifest: &Manifest, part: &str) -> String {
    let folder = fs::canonicalize(&manifest.base_dir).unwrap_or_else(|_| manifest.base_dir.clone());
    format!("{} {part}", folder.join(&manifest.name).display())
}

pub(super) fn weights_id(workspace: &Workspace, imported: &Imported) -> Result<WeightsId, Fault> {
    if let Some(seed) = imported.weights.synthetic_seed() {
        return Ok(WeightsId::Synthetic { seed });
    }
    let digests = workspace.cache.file_digests();
    let files = imported
        .weights
        .files()
        .iter()
        .map(|(path, _)| Ok((file_name(path), digests.digest(path)?.digest)))
        .collect::<Result<_, CacheError>>()?;
    let weights = &imported.weights;
    Ok(WeightsId::Files { files, tensors: key(weights).0, readings: weights.readings() })
}

/// A schedule that was proven when it was stored; every process that executes or compiles it proves it again.
pub(super) struct StoredSchedule {
    pub candidate: Candidate,
    pub content: Digest,
    entry: Entry,
    validated: OnceLock<Arc<Validated>>,
}

impl StoredSchedule {
    /// A schedule that is in the cache, and that this process has not parsed yet.
    pub fn of_entry(candidate: Candidate, entry: Entry) -> StoredSchedule {
        StoredSchedule { candidate, content: entry.content(), entry, validated: OnceLock::new() }
    }

    pub fn text(&self) -> Result<String, Fault> {
        text_of(&self.entry)
    }

    /// The schedule with its proof: what was just proven, or the stored text parsed and proven again.
    pub fn validated(&self, target: &Target) -> Result<&Arc<Validated>, Fault> {
        if let Some(validated) = self.validated.get() {
            return Ok(validated);
        }
        let parsed = parse(&self.text()?).map_err(|error| {
            Fault::internal(format!("the stored schedule `{}` cannot be read: {error}", self.entry.path().display()))
        })?;
        let validated = validate(parsed, target)?;
        Ok(self.validated.get_or_init(|| Arc::new(validated)))
    }
}

fn text_of(entry: &Entry) -> Result<String, Fault> {
    String::from_utf8(entry.bytes()?.into_owned())
        .map_err(|_| Fault::internal(format!("`{}` is no text", entry.path().display())))
}

/// Lowers, schedules and proves the candidate; one stage, because none of the three has a result of its own.
pub(super) fn place(context: &BuildContext<'_>, candidate: &Candidate) -> Result<StoredSchedule, NotMade> {
    let keyed = context.schedule_key(candidate);
    let target = context.target;
    let validated = OnceLock::new();
    let title = context.title(keys::SCHEDULE);
    let (entry, _) = context.workspace.stage(&keyed, &context.subject(), &title, "lower, place, prove", || {
        let placed = context.lower(candidate).and_then(|program| schedule(program, target, candidate));
        let placed = placed.map_err(NotMade::Infeasible)?;
        let text = print(&placed);
        let proven = prove(context, placed).map_err(|fault| save_rejected(&text, fault))?;
        let _ = validated.set(Arc::new(proven));
        Ok::<_, NotMade>(text.into_bytes())
    })?;
    Ok(StoredSchedule { candidate: candidate.clone(), content: entry.content(), entry, validated })
}

/// Steps of several rows on the CPU, over the pack of the one-row schedule: lowered, placed and proven as one stage, like that. The first of
/// `batches` that fits is taken. `base` is the candidate of one row. `keys`: what lowers the rows of a batch.
///
/// # Errors
/// No batch fits.
pub(super) fn place_rows(
    context: &BuildContext<'_>,
    base: &Candidate,
    batches: &[Batch],
    keys: &[&str],
) -> Result<(Batch, StoredSchedule), Fault> {
    let (batch, candidate) = fitting_rows(context, base, batches, keys)?;
    Ok((batch, place_batch(context, candidate, &batch)?))
}

/// The batch that [`place_rows`] takes, and its candidate.
///
/// # Errors
/// No batch fits.
pub(super) fn fitting_rows(
    context: &BuildContext<'_>,
    base: &Candidate,
    batches: &[Batch],
    keys: &[&str],
) -> Result<(Batch, Candidate), Fault> {
    let Manifest { precision, decode, .. } = context.manifest;
    let (target, precision, context_max) = (context.target, *precision, decode.context_max);
    let mut refused = Fault::internal("no number of rows to place");
    for batch in batches {
        match cpu_candidate(&context.imported.graph, precision, context_max, target, base, batch) {
            Ok(candidate) => return Ok((*batch, candidate)),
            Err(reason) => {
                let remedy = match keys {
                    [] => "build it for a target with more shared memory".to_string(),
                    keys => format!("lower {}", one_of(keys.iter().copied())),
                };
                let message =
                    format!("steps of {} do not fit `{}`: {reason}", counted(batch.rows.into(), "row"), target.name);
                refused = Fault::input(message).with_remedy(remedy);
            }
        }
    }
    Err(refused)
}

/// Names the steps of a batch on the CPU.
pub(super) fn batch_key(context: &BuildContext<'_>, candidate: &Candidate, batch: &Batch) -> Keyed {
    let Manifest { precision, decode, .. } = context.manifest;
    ScheduleKey {
        code: keys::code(keys::SCHEDULE),
        graph: context.graph,
        precision: *precision,
        context_max: decode.context_max,
        candidate,
        target: context.target,
        batch: Some(*batch),
    }
    .keyed()
}

/// Lowers, places and proves steps of several rows on the CPU.
fn place_batch(context: &BuildContext<'_>, candidate: Candidate, batch: &Batch) -> Result<StoredSchedule, Fault> {
    let Manifest { precision, decode, .. } = context.manifest;
    let (target, precision, context_max) = (context.target, *precision, decode.context_max);
    let keyed = batch_key(context, &candidate, batch);
    let validated = OnceLock::new();
    let title = format!("{} of {} rows", context.title(keys::SCHEDULE), batch.rows);
    let subject = format!("{} rows", context.subject());
    let (entry, _) = context.workspace.stage(&keyed, &subject, &title, "lower, place, prove", || {
        let graph = &context.imported.graph;
        let program = lower_batch(graph, &graph.family, precision, context_max, batch, &candidate);
        let placed = program.and_then(|program| schedule(program, target, &candidate));
        let placed = placed.map_err(|reason| Fault::from(NotMade::Infeasible(reason)))?;
        let text = print(&placed);
        let proven = prove(context, placed).map_err(|fault| save_rejected(&text, fault))?;
        let _ = validated.set(Arc::new(proven));
        Ok::<_, Fault>(text.into_bytes())
    })?;
    Ok(StoredSchedule { candidate, content: entry.content(), entry, validated })
}

/// Proves a schedule that our own lowering made, and that its program computes the model. A program of one op alone has no model.
///
/// # Errors
/// A broken rule: a fault of this program.
pub(super) fn prove(context: &BuildContext<'_>, placed: Schedule) -> Result<Validated, Fault> {
    let validated = validate(placed, context.target)?;
    if context.op.is_none() {
        same(&context.imported.graph, &validated.schedule().program)?;
    }
    Ok(validated)
}

/// Keeps a schedule that our own lowering made and our own proof refuses.
fn save_rejected(text: &str, fault: Fault) -> Fault {
    let path = std::env::temp_dir().join(format!("monobloc-rejected-{}.mkir", Digest::of(text.as_bytes()).short()));
    let place = match fs::write(&path, text) {
        Ok(()) => format!("the schedule was saved as `{}`", path.display()),
        Err(error) => format!("the schedule could not be saved as `{}`: {error}", path.display()),
    };
    let Fault { message, .. } = fault;
    Fault { tier: Tier::Internal, message, remedy: Some(format!("{place}; report it with this message")) }
}

pub(super) struct Generated {
    pub source: KernelSource,
    pub content: Digest,
}

impl Generated {
    /// Wraps a source that is no artefact of its own. Its headers are those of this version.
    pub fn of(source: KernelSource) -> Generated {
        Generated { content: Digest::of(source.text.as_bytes()), source }
    }
}

pub(super) fn source_bytes(validated: &Validated, target: &Target) -> Result<Vec<u8>, Fault> {
    stored::source_bytes(emit(validated, target, Trace::Off))
}

/// Of the kernel of a schedule: digests of what it is compiled from, and of all that it walks.
pub(super) fn kernel_digests(validated: &Validated, target: &Target) -> Result<[Digest; 2], Fault> {
    Ok([Digest::of(&source_bytes(validated, target)?), Queues::of(validated).digest()])
}

pub(super) fn stored_source(entry: &Entry) -> Result<KernelSource, Fault> {
    stored::source(&entry.bytes()?, &entry.path().display().to_string())
}

/// A pack that lies in a file.
struct MappedPack {
    map: Mmap,
    bytes: usize,
}

impl AsRef<[u8]> for MappedPack {
    fn as_ref(&self) -> &[u8] {
        self.map.get(..self.bytes).unwrap_or(&self.map)
    }
}

/// Makes sure that the pack of a checkpoint is stored under `keyed`.
pub(super) fn store_pack(context: &BuildContext<'_>, schedule: &StoredSchedule, keyed: &Keyed) -> Result<Entry, Fault> {
    let workspace = context.workspace;
    let (entry, _) = workspace.run_stage(keyed, &context.subject(), &context.title(keys::PACK), "", |keyed| {
        let validated = schedule.validated(context.target)?;
        let Keyed { stage, key, why } = keyed;
        workspace.cache.get_or_build_file(stage, key, why, |file| {
            let content = write_pack(context, validated, file)?;
            // Before another process can see the pack: it would remove one without a link.
            workspace.attest(keyed, content)
        })
    })?;
    Ok(entry)
}

/// Writes the pack piece by piece; returns the digest of all of it.
pub(super) fn write_pack(context: &BuildContext<'_>, validated: &Validated, file: &mut File) -> Result<Digest, Fault> {
    let (schedule, Imported { graph, weights, .. }) = (validated.schedule(), context.imported);
    let megabytes = pack_bytes(schedule) >> 20;
    let progress = context.workspace.report.progress("MiB packed", megabytes);
    let mut told = 0;
    let mut hasher = blake3::Hasher::new();
    pack_pieces(schedule, graph, weights, |at, bytes| {
        hasher.update_rayon(bytes);
        let write = |source| Fault::from(CacheError::io("write", context.workspace.cache.root(), source));
        file.write_all(bytes).map_err(write)?;
        let now = (at + bytes.len() as u64) >> 20;
        progress.inc(now - told);
        told = now;
        Ok::<(), Fault>(())
    })?;
    Ok(Digest::from(hasher.finalize()))
}

/// Makes a pack in memory, from weights that can be read or made as often as needed.
pub(super) fn memory_pack(context: &BuildContext<'_>, validated: &Validated) -> Result<Pack, Fault> {
    let (schedule, Imported { graph, weights, .. }) = (validated.schedule(), context.imported);
    let bytes = pack_bytes(schedule);
    let none = |error| Fault::environment(format!("no memory for a pack of {bytes} bytes: {error}"));
    let mut map = MmapMut::map_anon(usize::try_from(bytes).unwrap_or(usize::MAX).max(1)).map_err(none)?;
    // Where the system refuses large pages, the pack is made all the same, and takes longer: 3.9 million pages for 8B.
    #[cfg(target_os = "linux")]
    drop(map.advise(Advice::HugePage));
    fill(schedule, graph, weights, &mut map)?;
    Ok(Arc::new(map))
}

pub(super) fn map_pack(entry: &Entry) -> Result<Pack, Fault> {
    map_file(entry.path(), entry.len())
}

/// Maps the first `bytes` bytes of a file that nothing changes any more.
pub(super) fn map_file(path: &Path, bytes: u64) -> Result<Pack, Fault> {
    let bytes = usize::try_from(bytes)
        .map_err(|_| Fault::environment(format!("`{}` is larger than this machine can address", path.display())))?;
    let file = files::open(path)?;
    // SAFETY: a mapping is unsound only if the file changes under it. Entries of the cache are written under another
    // name and never again after their rename; a collector removes the name, which leaves a mapping whole. The files of an
    // export are treated as weight files are: written once, and immutable from then on.
    let map = unsafe { Mmap::map(&file) }.map_err(|error| unreadable(path, error))?;
    if map.len() < bytes {
        return Err(unreadable(path, format!("expected {bytes} bytes, found {}", map.len())));
    }
    Ok(Arc::new(MappedPack { map, bytes }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::format::{Code, Format, ScaleCode};
    use crate::interp::{Interp, Options};
    use crate::model::coded::{CodeLayout, Component, GroupIndex, Recipe, ScaleLayout, Whole, ZeroLayout};
    use crate::model::graph::TensorId;
    use crate::pipeline::chain::{Chain, Host};
    use crate::report::Report;

    type Turn = (&'static str, &'static str, fn(&mut Recipe));

    /// A change of each field of a recipe, and of each part of it, on a fixture whose values depend on it.
    const TURNS: [Turn; 18] = [
        ("format", "nvfp4", |recipe| recipe.format = Format::by_row(Code::Int8)),
        ("code", "nvfp4", |recipe| recipe.code = Code::Int4),
        ("rows", "gptq-v1-asym", |recipe| recipe.rows -= 8),
        ("cols", "ct-int4-g32-asym", |recipe| recipe.cols -= 8),
        ("place of codes", "nvfp4", |recipe| back(&mut recipe.codes.0)),
        ("layout of codes", "gptq-v1-asym", |recipe| recipe.codes.1 = CodeLayout::WordsOfRow),
        ("group_k", "ct-int4-g32-asym", |recipe| recipe.group_k *= 2),
        ("place of scales", "nvfp4", |recipe| back(&mut recipe.scales.0)),
        ("code of scales", "gptq-v1-asym", |recipe| recipe.scales.1 = ScaleCode::Bf16),
        ("layout of scales", "gptq-v1-asym", |recipe| recipe.scales.2 = ScaleLayout::RowGroups),
        ("place of zeros", "ct-int4-g32-asym", |recipe| recipe.zeros.iter_mut().for_each(|(at, _)| back(at))),
        ("layout of zeros", "gptq-v1-asym", |recipe| {
            recipe.zeros.iter_mut().for_each(|(_, layout)| *layout = ZeroLayout::Words)
        }),
        ("g_idx", "gptq-v1-asym", |recipe| recipe.g_idx = None),
        ("place of g_idx", "gptq-v1-asym", |recipe| recipe.g_idx.iter_mut().for_each(|(at, _)| back(at))),
        ("kind of g_idx", "gptq-v1-asym", |recipe| {
            recipe.g_idx.iter_mut().for_each(|(_, kind)| *kind = GroupIndex::AnyOrNone)
        }),
        ("symmetric", "gptq-v1-asym", |recipe| recipe.symmetric = true),
        ("place of the factor", "nvfp4", |recipe| recipe.whole.iter_mut().for_each(|(at, _)| back(at))),
        ("factor", "nvfp4", |recipe| recipe.whole.iter_mut().for_each(|(_, kind)| *kind = Whole::Multiply)),
    ];

    /// Other bytes: four before these.
    fn back(component: &mut Component) {
        component.bytes = component.bytes.start - 4..component.bytes.end - 4;
    }

    /// The identity of the weights of a fixture whose recipes are turned, and its logits with what a cache holds.
    fn answer(cache: &Path, fixture: &str, turn: fn(&mut Recipe)) -> (Digest, Result<Vec<Vec<f32>>, String>) {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(fixture);
        let text = format!(
            "[model]\nsource = \"path:{}\"\n[precision]\nweights = \"fp32\"\n[decode]\ncontext_max = 8\n\
             [[target]]\nrecord = \"cpu\"\n",
            model.display()
        );
        let manifest = Manifest::parse(&text, Path::new("m.toml")).unwrap();
        let cache = Cache::open(cache).unwrap();
        let workspace = Workspace { cache, report: Report::quiet(), trials: "trials.csv".into() };
        let mut model = load_model(&workspace, &manifest).unwrap();
        for id in (0..model.imported.graph.tensors.len()).map(TensorId::from) {
            model.imported.weights.recipe_mut(id).into_iter().for_each(turn);
        }
        let context = BuildContext::new(&workspace, &manifest, &manifest.targets[0], &model).unwrap();
        let host = Host::new(&workspace);
        let chain = Chain::new(context, &host, context.default_candidate());
        let schedule = chain.validated().unwrap().schedule();
        let logits = chain.pack().map_err(|refused| Fault::from(refused).to_string()).map(|pack| {
            let mut interp = Interp::new(schedule, pack, Options::fast()).unwrap();
            interp.logits(&[5, 9, 3, 17]).unwrap()
        });
        (key(&context.weights_id().unwrap()).0, logits)
    }

    /// `quantization_config` says how stored bytes are read, and can be corrected: the pack of the old reading is another one.
    #[test]
    fn a_cache_answers_for_the_recipes_of_now() {
        let shared = tempfile::tempdir().unwrap();
        let mut moved = 0;
        for (field, fixture, turn) in TURNS {
            let as_stored = answer(shared.path(), fixture, |_| ());
            let turned = answer(shared.path(), fixture, turn);
            let fresh = answer(tempfile::tempdir().unwrap().path(), fixture, turn);
            assert_ne!(as_stored.0, turned.0, "{field} is in the identity of weights");
            assert!(turned.1 == fresh.1, "{field}: the cache answers for another recipe");
            moved += usize::from(as_stored.1 != fresh.1);
        }
        // Without an effect: the code of the recipe, and groups of columns that follow each other, whatever they may be.
        assert_eq!(moved, TURNS.len() - 3);
    }
}
