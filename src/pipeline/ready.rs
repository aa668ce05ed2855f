//! Owns `Ready`: a model on one target, built from a manifest or read from an export, with one interface.

use std::sync::Arc;

use super::batch::{Batched, cpu_batches};
use super::device_rows::Prefill;
use super::execute::{self, Devices, upload_pack};
use super::exported::{Does, Exported, Kernel};
use super::invariant;
use super::runner::{LazyPrefill, LazyVerifier, On, Runner};
use super::served::Served;
use super::{Prepared, Serving, Workspace, prepare};
use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::rows::RowsSession;
use crate::cuda::session::Session;
use crate::cuda::turns::TurnsSession;
use crate::error::Fault;
use crate::interp::{Interp, Options};
use crate::ir::layout::pack_bytes;
use crate::ir::program::Space;
use crate::lower::Batch;
use crate::manifest::Manifest;
use crate::report::Report;
use crate::rows::Shape;
use crate::target::{Target, TargetKind};

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
    Exported { report: Report, exported: Box<Exported>, target: Box<Target> },
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

    /// Takes an export, whose kernels are proven when something is to run. No cache is used.
    ///
    /// # Errors
    /// A target that the export does not have.
    pub fn exported(report: Report, exported: Exported, target: &Target) -> Result<Ready, Fault> {
        exported.parts(target)?;
        let (vocab, eos, bos) = (exported.index().vocab, exported.index().eos.clone(), exported.index().bos);
        Ok(Ready {
            vocab,
            eos,
            bos,
            from: From::Exported { report, exported: Box::new(exported), target: Box::new(target.clone()) },
        })
    }

    /// Receives progress.
    pub fn report(&self) -> &Report {
        match &self.from {
            From::Built { workspace, .. } => &workspace.report,
            From::Exported { report, .. } => report,
        }
    }

    /// Loads what decodes one text.
    ///
    /// # Errors
    /// As [`Prepared::runner`]; parts of an export that are not what was exported.
    pub fn runner(&self) -> Result<Runner<'_>, Fault> {
        match &self.from {
            From::Built { workspace, prepared } => prepared.runner(workspace),
            From::Exported { report, exported, target } => runner(report, exported, target),
        }
    }

    /// Rows of a step of [`Ready::batched`], at most.
    ///
    /// # Errors
    /// More requests than the kernels of a CUDA target have rows.
    pub fn rows_max(&self, serving: &Serving) -> Result<u32, Fault> {
        match &self.from {
            From::Built { prepared, .. } => prepared.rows_max(serving),
            From::Exported { exported, target, .. } => Ok(match exported.step_rows(target)? {
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
            From::Exported { exported, target, .. } => batched(exported, target, serving),
        }
    }
}

fn runner<'a>(report: &'a Report, exported: &'a Exported, target: &'a Target) -> Result<Runner<'a>, Fault> {
    if invariant::is_asked(exported.manifest(), target) {
        return invariant_runner(exported, target);
    }
    let none = || Fault::input(format!("the export has no kernel for one text on target `{}`", target.name));
    let Kernel { validated, cubin } = exported.kernel(target, Does::Text)?.ok_or_else(none)?;
    let (context_max, vocab) = (exported.index().context_max, exported.index().vocab);
    let Some(cubin) = cubin else {
        let pack = exported.pack(target, &validated)?;
        let interp = Interp::of_text(validated.schedule(), pack, Options::fast())?;
        let place = execute::cpu_place();
        return Ok(Runner { place, context_max, vocab, cached: vec![], on: On::Cpu(Box::new(interp)) });
    };
    let (device, place) = device_of(target)?;
    let (pack, steps_max) = (exported.pack(target, &validated)?, exported.index().steps_per_launch);
    let pack = upload_pack(&device, &validated, &pack)?;
    let session = Session::load_sharing(&device, &Queues::of(&validated), &cubin, Trace::Off, steps_max, pack)?;
    let beside = Arc::clone(&validated);
    // In an export the kernel that reads prompts also verifies: mostly it has more rows than a proposal needs.
    let verifier = LazyVerifier::new(device.clone(), move |device, one, rows| {
        let Some(Kernel { validated, cubin: Some(cubin) }) = exported.kernel_beside(target, Does::Prompt, &beside)?
        else {
            return Err(Fault::input(format!("the export has no kernel for several rows on target `{}`", target.name))
                .with_remedy("leave out `--lookup`, or run the manifest that was exported"));
        };
        let queues = Queues::of(&validated);
        let (pack, cache) = (one.pack(), Some(one.cache()));
        if rows > validated.schedule().program.rows {
            return Ok(Box::new(TurnsSession::load(device, &queues, &cubin, (rows, 1), pack, cache)?));
        }
        Ok(Box::new(RowsSession::load(device, &queues, &cubin, Trace::Off, 1, pack, cache)?))
    });
    let prefill = LazyPrefill::new(report, device, move |device, one| {
        let kernel = |does| exported.kernel_beside(target, does, &validated);
        let Some(Kernel { validated: rows, cubin: Some(cubin) }) = kernel(Does::Prompt)? else {
            return Err(Fault::input("the export has no kernel for them"));
        };
        // Kernels of waves have the schedule of the kernel for rows.
        let waves = Does::PROMPTS.map(kernel).into_iter().collect::<Result<Vec<_>, Fault>>()?;
        let waves: Vec<&[u8]> = waves.iter().flatten().filter_map(|kernel| kernel.cubin.as_deref()).collect();
        Prefill::of(device, target, &Queues::of(&rows), &cubin, &waves, one)
    });
    let on = On::Device { session: Box::new(session), prefill, verifier, steps_max };
    Ok(Runner { place, context_max, vocab, cached: vec![], on })
}

/// The device of an export's target, and what it is called.
fn device_of(target: &Target) -> Result<(Device, String), Fault> {
    let devices = Devices::list();
    let found = devices.find(target).map_err(|reason| {
        Fault::environment(format!("target `{}` has no device here: {reason}", target.name))
            .with_remedy("name another target of the export with `--target`, or export the model for `cpu`, too")
    })?;
    Ok((Device::open(found.ordinal)?, format!("{} (device {})", found.name, found.ordinal)))
}

/// As [`runner`], by kernels that add up in one order.
fn invariant_runner<'a>(exported: &'a Exported, target: &'a Target) -> Result<Runner<'a>, Fault> {
    let mut kernels = vec![];
    for does in [Does::Steps32, Does::Steps64] {
        kernels.extend(exported.kernel(target, does)?);
    }
    let last = kernels.last().ok_or_else(|| {
        Fault::input(format!("the export has no kernels that add up in one order on target `{}`", target.name))
    })?;
    let validated = last.validated.clone();
    let (device, place) = device_of(target)?;
    let pack = upload_pack(&device, &validated, &exported.pack(target, &validated)?)?;
    let (steps_max, context_max) = (exported.index().steps_per_launch, exported.index().context_max);
    let cubins = kernels.iter().filter_map(|kernel| kernel.cubin.as_deref());
    let sessions = invariant::load(&device, target, &validated, cubins, steps_max, &pack)?;
    let on = On::invariant(sessions, steps_max)?;
    Ok(Runner { place, context_max, vocab: exported.index().vocab, cached: vec![], on })
}

fn batched(exported: &Exported, target: &Target, serving: &Serving) -> Result<Batched, Fault> {
    let none = || {
        Fault::input(format!("the export has no steps of several rows on target `{}`", target.name))
            .with_remedy("name another target with `--target`, or the manifest that was exported")
    };
    if target.kind == TargetKind::Cuda {
        return batched_on_device(exported, target, serving, exported.served(target)?.ok_or_else(none)?);
    }
    let Kernel { validated, .. } = exported.kernel(target, Does::Batch)?.ok_or_else(none)?;
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
fn batched_on_device(
    exported: &Exported,
    target: &Target,
    serving: &Serving,
    served: Served,
) -> Result<Batched, Fault> {
    let schedule = served.validated.schedule();
    let shape = Shape::of(&schedule.program).ok_or_else(|| Fault::internal("rows without tables"))?;
    let tokens = u64::from(shape.pages) * u64::from(shape.page_rows);
    refuse_more("requests", serving.running_max.into(), served.running_max.into())?;
    refuse_more("cached tokens", serving.cache_tokens.unwrap_or(0).into(), tokens)?;
    let (device, _) = device_of(target)?;
    let (needed, free) = (pack_bytes(schedule) + schedule.arena_bytes(Space::Cache), device.memory_free_bytes()?);
    if needed > free {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        return Err(Fault::environment(format!(
            "weights and a cache of {tokens} tokens take {:.1} GiB of device memory, {:.1} GiB are free",
            gib(needed),
            gib(free)
        ))
        .with_remedy("free memory of the device, or export the model again with fewer `--cache-tokens`"));
    }
    let pack = exported.pack(target, &served.validated)?;
    Ok(Batched::of_device(served, pack, device, target, serving.steps_max))
}
