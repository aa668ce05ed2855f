//! Owns `Ready`: a model on one target, built from a manifest or read from an export, with one interface.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::batch::{Batched, cpu_batches};
use super::checks::{self, Checking, Checks, by_interpreter};
use super::device_rows::{Prefill, refuse_turns};
use super::device_steps::By;
use super::execute::{self, Devices, upload_pack};
use super::exported::{Does, Exported, Kernel, cpu_kind};
use super::invariant;
use super::kernels::{self, KernelSet, Served};
use super::keys::{Hardware, WeightsId};
use super::mtp::{Mtp, OPTION};
use super::runner::{LazyPrefill, LazyVerifier, On, Runner, SNAPSHOTS};
use super::{Prepared, Serving, Workspace, prepare};
use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::rows::RowsSession;
use crate::cuda::session::Session;
use crate::cuda::turns::TurnsSession;
use crate::digest::Digest;
use crate::error::Fault;
use crate::interp::{Interp, Options};
use crate::ir::layout::held_bytes_max;
use crate::ir::program::Space;
use crate::lower::Batch;
use crate::manifest::Manifest;
use crate::report::Report;
use crate::rows::Shape;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;

/// The model that a user names: a manifest or an export.
pub struct Given {
    /// Of an export, what [`Exported::manifest`] says.
    pub manifest: Manifest,
    /// `None`: it is built from the manifest.
    pub exported: Option<Exported>,
}

impl Given {
    pub fn built(manifest: Manifest) -> Given {
        Given { manifest, exported: None }
    }

    pub fn exported(exported: Exported) -> Given {
        Given { manifest: exported.manifest().clone(), exported: Some(exported) }
    }

    /// Name of its model.
    pub fn model_name(&self) -> String {
        self.exported.as_ref().map_or_else(|| self.manifest.model_name(), |exported| exported.model_name().to_string())
    }
}

/// A model on one target.
pub struct Ready {
    pub vocab: u32,
    /// Ids that end a text.
    pub eos: Vec<u32>,
    /// The id that begins a text.
    pub bos: Option<u32>,
    from: From,
}

enum From {
    Built { workspace: Box<Workspace>, prepared: Box<Prepared> },
    Exported(Box<FromExport>),
}

/// Opens what checks are kept in.
pub type OpenWorkspace = Box<dyn Fn() -> Result<Workspace, Fault> + Send + Sync>;

/// A target of an export.
struct FromExport {
    report: Report,
    exported: Exported,
    target: Target,
    checking: Checking,
    /// Where a check that the export does not record is kept; `None`: such a kernel is refused.
    open: Option<OpenWorkspace>,
}

impl Ready {
    /// Builds what is not built yet, up to the proof.
    ///
    /// # Errors
    /// As [`prepare`].
    pub fn built(workspace: Workspace, manifest: &Manifest, target: &Target) -> Result<Ready, Fault> {
        let prepared = Box::new(prepare(&workspace, manifest, target)?);
        let graph = &prepared.imported.graph;
        let (vocab, eos, bos) = (graph.vocab, graph.eos.clone(), graph.bos);
        Ok(Ready { vocab, eos, bos, from: From::Built { workspace: Box::new(workspace), prepared } })
    }

    /// Takes an export, whose kernels are proven when something is to run. No cache is used, unless [`Ready::checks_in`] names one.
    ///
    /// # Errors
    /// A target that the export does not have.
    pub fn exported(report: Report, exported: Exported, target: &Target) -> Result<Ready, Fault> {
        exported.parts(target)?;
        let (vocab, eos, bos) = (exported.index().vocab, exported.index().eos.clone(), exported.index().bos);
        let target = target.clone();
        let from = FromExport { report, exported, target, checking: Checking::Required, open: None };
        Ok(Ready { vocab, eos, bos, from: From::Exported(Box::new(from)) })
    }

    /// Whether kernels are checked before they give a token. If not, the user is told. Of an export that was made so, it is told in any case.
    pub fn checking(mut self, checking: Checking) -> Ready {
        match &mut self.from {
            From::Built { workspace, prepared } => {
                prepared.checking = checking;
                checking.warn(&workspace.report);
            }
            From::Exported(from) if from.exported.index().unchecked => {
                from.checking = Checking::Skipped;
                from.report.warning("this export was made with `--unchecked`: its kernels were not checked");
            }
            From::Exported(from) => {
                from.checking = checking;
                checking.warn(&from.report);
            }
        }
        self
    }

    /// Lets kernels of an export be checked on a kind of device for which the export records no check. `open` is called if one has to be.
    pub fn checks_in(mut self, open: OpenWorkspace) -> Ready {
        if let From::Exported(from) = &mut self.from {
            from.open = Some(open);
        }
        self
    }

    /// Whether tokens come from kernels that may not have been checked.
    pub fn is_unchecked(&self) -> bool {
        match &self.from {
            From::Built { prepared, .. } => prepared.checking == Checking::Skipped,
            From::Exported(from) => from.checking == Checking::Skipped,
        }
    }

    /// Adds ids that end a text, which the tokenizer names.
    pub fn end_also(&mut self, ids: Vec<u32>) {
        self.eos.extend(ids);
        self.eos.sort_unstable();
        self.eos.dedup();
    }

    /// Receives progress.
    pub fn report(&self) -> &Report {
        match &self.from {
            From::Built { workspace, .. } => &workspace.report,
            From::Exported(from) => &from.report,
        }
    }

    /// Loads what decodes one text.
    ///
    /// # Errors
    /// As [`Prepared::runner`]; parts of an export that are not what was exported.
    pub fn runner(&self) -> Result<Runner<'_>, Fault> {
        match &self.from {
            From::Built { workspace, prepared } => prepared.runner(workspace),
            From::Exported(from) => runner(from),
        }
    }

    /// Makes the draft of the checkpoint's own layer that predicts further tokens.
    ///
    /// # Errors
    /// An export, which has none; as [`Prepared::mtp`].
    pub fn mtp(&self) -> Result<Mtp, Fault> {
        match &self.from {
            From::Built { workspace, prepared } => prepared.mtp(workspace),
            From::Exported(_) => Err(Fault::input(format!(
                "`{OPTION}` needs a manifest or a checkpoint, found an export, which has no draft"
            ))
            .with_remedy("run the manifest that was exported, or propose with `--lookup`")),
        }
    }

    /// Rows of a step of [`Ready::batched`], at most.
    ///
    /// # Errors
    /// More requests than the kernels of a CUDA target have rows.
    pub fn rows_max(&self, serving: &Serving) -> Result<u32, Fault> {
        match &self.from {
            From::Built { prepared, .. } => prepared.rows_max(serving),
            From::Exported(from) => Ok(match from.exported.step_rows(&from.target)? {
                Some(rows) => rows,
                None => serving.running_max + serving.chunk_rows,
            }),
        }
    }

    /// The schedule and weights of steps with several rows. Those of an export have the sizes that it was exported with.
    ///
    /// # Errors
    /// As [`Prepared::batched`]; a batch that is larger than that of the export.
    pub fn batched(&self, serving: &Serving) -> Result<Batched, Fault> {
        match &self.from {
            From::Built { workspace, prepared } => prepared.batched(workspace, serving),
            From::Exported(from) => batched(from, serving),
        }
    }
}

impl FromExport {
    /// Makes sure that `files` were checked on this kind of hardware: the export says so, or `check` finds it out. `reference` is what expected
    /// logits are computed by.
    ///
    /// # Errors
    /// A kernel that computes something else; one that cannot be checked here.
    fn ensure(
        &self,
        hardware: Hardware,
        files: &[&str],
        reference: Option<&Arc<Validated>>,
        check: &mut dyn FnMut(&Checks<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let FromExport { exported, target, .. } = self;
        if self.checking == Checking::Skipped || exported.was_checked(target, &hardware.name, files)? {
            return Ok(());
        }
        let (Some(open), Some(reference)) = (&self.open, reference) else {
            let message = format!("the export does not say that its kernels were checked on {}", hardware.name);
            return Err(Fault::environment(message).with_remedy(format!(
                "export the model again on a machine with such hardware, or run it as it is with `{UNCHECKED}`"
            )));
        };
        let workspace = open()?;
        let (parts, precision) = (exported.parts(target)?, exported.manifest().precision);
        let pack_digest = exported.pack_digest(target)?;
        let pack = || exported.pack(target, reference);
        check(&Checks {
            workspace: &workspace,
            subject: format!("{} {}", exported.place().display(), target.name),
            target,
            precision,
            hardware,
            graph: Digest::of(parts.pack_identity.as_bytes()),
            weights: WeightsId::Files {
                files: vec![(parts.pack.clone(), pack_digest)],
                tensors: pack_digest,
                readings: BTreeSet::new(),
            },
            parameters: exported.index().parameters,
            reference: Arc::clone(reference),
            pack: &pack,
            expect: by_interpreter,
        })
    }
}

/// The option that leaves checks out.
const UNCHECKED: &str = "--unchecked";

fn runner(from: &FromExport) -> Result<Runner<'_>, Fault> {
    let FromExport { report, exported, target, .. } = from;
    if invariant::is_asked(exported.manifest(), target) {
        return invariant_runner(from);
    }
    let none = || Fault::input(format!("the export has no kernel for one text on target `{}`", target.name));
    let Kernel { validated, cubin, file, knobs: _ } = exported.kernel(target, Does::Text)?.ok_or_else(none)?;
    let (context_max, vocab) = (exported.index().context_max, exported.index().vocab);
    let has_state = validated.schedule().program.has_state();
    let Some(cubin) = cubin else {
        from.ensure(of_cpu(), &[&file], None, &mut |_| Ok(()))?;
        let pack = exported.pack(target, &validated)?;
        let interp = Interp::of_text(validated.schedule(), pack, Options::fast())?;
        let place = execute::cpu_place();
        let on = On::Cpu(Box::new(interp));
        return Ok(Runner { place, context_max, vocab, cached: vec![], on, has_state, snapshots: [None; SNAPSHOTS] });
    };
    let (device, identity) = device_of(target)?;
    let (pack, steps_max) = (exported.pack(target, &validated)?, exported.index().steps_per_launch);
    let pack = upload_pack(&device, &validated, &pack)?;
    let load = || {
        let (queues, pack) = (Queues::of(&validated), Arc::clone(&pack));
        Ok::<Session, Fault>(Session::load_sharing(&device, &queues, &cubin.bytes, Trace::Off, steps_max, pack)?)
    };
    let hardware = execute::hardware_of(&identity);
    from.ensure(hardware.clone(), &[&file], Some(&validated), &mut |checks| {
        checks.ensure_decode(&cubin.bytes, &load, steps_max)
    })?;
    let session = load()?;
    let set = prompt_set(from, &validated)?;
    let of_verifier = (Arc::clone(&validated), hardware.clone(), set.clone());
    // In an export the kernel that reads prompts also verifies: mostly it has more rows than a proposal needs.
    let verifier = LazyVerifier::new(device.clone(), move |device, one, rows| {
        let (reference, hardware, set) = &of_verifier;
        let Some(PromptSet { set, files }) = set else {
            return Err(Fault::input(format!("the export has no kernel for several rows on target `{}`", target.name))
                .with_remedy("leave out `--lookup`, or run the manifest that was exported"));
        };
        ensure_beside(from, hardware, reference, (set, files), (device, one))?;
        let none = || Fault::internal("prompts without a kernel for rows");
        let (steps, kernel) = set.steps().into_iter().next().ok_or_else(none)?;
        let queues = Queues::of(&steps.validated);
        let (cubin, pack, cache) = (&kernel.code.bytes, one.pack(), Some(one.cache()));
        refuse_turns(target, rows, &steps)?;
        if rows > steps.launch_rows() {
            return Ok(Box::new(TurnsSession::load(device, &queues, cubin, (rows, 1), pack, cache)?));
        }
        Ok(Box::new(RowsSession::load(device, &queues, cubin, Trace::Off, 1, pack, cache)?))
    });
    let prefill = LazyPrefill::new(report, device.clone(), move |device, one| {
        let Some(PromptSet { set, files }) = &set else {
            return Err(Fault::input("the export has no kernel for them"));
        };
        ensure_beside(from, &hardware, &validated, (set, files), (device, one))?;
        let none = || Fault::internal("prompts without a kernel for rows");
        let (steps, kernel) = set.steps().into_iter().next().ok_or_else(none)?;
        Prefill::of(device, target, &Queues::of(&steps.validated), &kernel.code.bytes, set.prompts(), one)
    });
    let place = execute::place_of(&identity, target);
    let on = On::Device { session: Box::new(session), prefill, verifier, steps_max };
    Ok(Runner { place, context_max, vocab, cached: vec![], on, has_state, snapshots: [None; SNAPSHOTS] })
}

/// Kernels that read the prompt of one text, and their files.
#[derive(Clone)]
struct PromptSet {
    set: KernelSet,
    files: Vec<String>,
}

/// The kernels over the cache of `one` that read prompts; `None`: the export has none.
fn prompt_set(from: &FromExport, one: &Validated) -> Result<Option<PromptSet>, Fault> {
    let (mut kernels, mut files) = (vec![], vec![]);
    for does in [Does::Prompt, Does::Waves, Does::Tail] {
        let Some(kernel) = from.exported.kernel_beside(&from.target, does, one)? else { continue };
        let Kernel { validated, cubin: Some(code), file, knobs } = kernel else { continue };
        let rows = validated.schedule().program.rows;
        let does = does.in_set().unwrap_or(kernels::Does::Steps { rows, by: By::Words });
        kernels.push(kernels::Kernel { does, validated: Some(validated), knobs, code });
        files.push(file);
    }
    if kernels.is_empty() { Ok(None) } else { Ok(Some(PromptSet { set: KernelSet::new(false, kernels)?, files })) }
}

/// Makes sure that kernels over the weights and the cache of `one` were checked. What the cache holds is lost.
fn ensure_beside(
    from: &FromExport,
    hardware: &Hardware,
    reference: &Arc<Validated>,
    (set, files): (&KernelSet, &[String]),
    (device, one): (&Device, &Session),
) -> Result<(), Fault> {
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    from.ensure(hardware.clone(), &files, Some(reference), &mut |checks| {
        checks.ensure(set, &mut || set.load(device, &from.target, checks::STEPS_MAX, &one.pack(), Some(one.cache())))
    })
}

/// The hardware of a schedule for `cpu`: an export names the kind alone.
fn of_cpu() -> Hardware {
    Hardware { name: cpu_kind(), ..execute::host() }
}

/// The device of an export's target, with those that run the model together with it.
fn device_of(target: &Target) -> Result<(Device, DeviceIdentity), Fault> {
    let devices = Devices::list();
    let found = devices.find(target).map_err(|reason| {
        Fault::environment(format!("target `{}` has no device here: {reason}", target.name))
            .with_remedy("name another target of the export with `--target`, or export the model for `cpu`, too")
    })?;
    Ok((execute::open(found, target)?, found.clone()))
}

/// As [`runner`], by kernels that add up in one order.
fn invariant_runner(from: &FromExport) -> Result<Runner<'_>, Fault> {
    let FromExport { exported, target, .. } = from;
    let (mut kernels, mut files) = (vec![], vec![]);
    for does in [Does::Steps32, Does::Steps64] {
        if let (Some(kernel), Some(rows)) = (exported.kernel(target, does)?, does.alike_rows())
            && let Some(code) = kernel.cubin
        {
            let does = kernels::Does::Steps { rows, by: By::Waves };
            kernels.push(kernels::Kernel { does, validated: Some(kernel.validated), knobs: kernel.knobs, code });
            files.push(kernel.file);
        }
    }
    if kernels.is_empty() {
        let none = "the export has no kernels that add up in one order on target";
        return Err(Fault::input(format!("{none} `{}`", target.name)));
    }
    let set = KernelSet::new(true, kernels)?;
    let (device, identity) = device_of(target)?;
    let pack = upload_pack(&device, set.validated(), &exported.pack(target, set.validated())?)?;
    let (steps_max, context_max) = (exported.index().steps_per_launch, exported.index().context_max);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    from.ensure(execute::hardware_of(&identity), &files, Some(set.validated()), &mut |checks| {
        checks.ensure(&set, &mut || set.load(&device, target, checks::STEPS_MAX, &pack, None))
    })?;
    let has_state = set.validated().schedule().program.has_state();
    let on = On::invariant(set.load(&device, target, steps_max, &pack, None)?, steps_max)?;
    let place = execute::place_of(&identity, target);
    Ok(Runner {
        place,
        context_max,
        vocab: exported.index().vocab,
        cached: vec![],
        on,
        has_state,
        snapshots: [None; SNAPSHOTS],
    })
}

fn batched(from: &FromExport, serving: &Serving) -> Result<Batched, Fault> {
    let FromExport { exported, target, .. } = from;
    let none = || {
        Fault::input(format!("the export has no steps of several rows on target `{}`", target.name))
            .with_remedy("name another target with `--target`, or the manifest that was exported")
    };
    if target.kind == TargetKind::Cuda {
        return batched_on_device(from, serving, exported.served(target)?.ok_or_else(none)?);
    }
    let Kernel { validated, file, .. } = exported.kernel(target, Does::Batch)?.ok_or_else(none)?;
    let shape = Shape::of(&validated.schedule().program)
        .ok_or_else(|| Fault::input("the steps of several rows of the export have one row"))?;
    let batches = cpu_batches(serving, &exported.manifest().decode);
    let sizes = |batch: &Batch| {
        let Batch { rows, sequences, pages, .. } = *batch;
        [("rows", rows, shape.rows), ("sequences", sequences, shape.sequences), ("pages", pages, shape.pages)]
    };
    // The export may have fewer rows than the default asks for, because no more fitted.
    let fits = |batch: &Batch| sizes(batch).iter().all(|(_, asked, most)| asked <= most);
    if !batches.iter().any(fits) {
        for (what, asked, most) in batches.last().map(sizes).into_iter().flatten() {
            refuse_more(what, asked.into(), most.into())?;
        }
    }
    from.ensure(of_cpu(), &[&file], None, &mut |_| Ok(()))?;
    let pack = exported.pack(target, &validated)?;
    Ok(Batched::of_cpu(validated, pack))
}

fn refuse_more(what: &str, asked: u64, most: u64) -> Result<(), Fault> {
    if asked <= most {
        return Ok(());
    }
    let message = format!("the export has room for at most {most} {what}, {asked} are asked for");
    Err(Fault::input(message)
        .with_remedy("ask for fewer requests, prompt tokens or cached tokens, or export the model again"))
}

/// The kernels of an export for a server, on the device of their target.
///
/// # Errors
/// More requests or cached tokens than the export has room for; a device without room for that.
fn batched_on_device(from: &FromExport, serving: &Serving, served: Served) -> Result<Batched, Fault> {
    let FromExport { exported, target, .. } = from;
    let validated = Arc::clone(served.set.validated());
    let schedule = validated.schedule();
    let shape = Shape::of(&schedule.program).ok_or_else(|| Fault::internal("rows without tables"))?;
    let tokens = u64::from(shape.pages) * u64::from(shape.page_rows);
    refuse_more("requests", serving.running_max.into(), served.running_max.into())?;
    refuse_more("cached tokens", serving.cache_tokens.unwrap_or(0).into(), tokens)?;
    let (device, identity) = device_of(target)?;
    let (needed, free) = (held_bytes_max(schedule) + schedule.arena_bytes(Space::Cache), device.memory_free_bytes()?);
    if needed > free {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        return Err(Fault::environment(format!(
            "weights and a cache of {tokens} tokens take {:.1} GiB of device memory, {:.1} GiB are free",
            gib(needed),
            gib(free)
        ))
        .with_remedy("free memory of the device, or export the model again with fewer `--cache-tokens`"));
    }
    let pack = exported.pack(target, &validated)?;
    let text = exported.kernel(target, Does::Text)?.map(|kernel| kernel.validated);
    let reference = text.unwrap_or_else(|| Arc::clone(&validated));
    let set = &served.set;
    from.ensure(execute::hardware_of(&identity), &exported.served_files(target)?, Some(&reference), &mut |checks| {
        checks.ensure(set, &mut || {
            let pack = upload_pack(&device, set.validated(), &pack)?;
            set.load(&device, target, checks::STEPS_MAX, &pack, None)
        })
    })?;
    Ok(Batched::of_device(served, pack, device, target, serving.steps_max))
}
