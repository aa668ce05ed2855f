//! Owns the answers to "what would run, and why" and "what does this stage hold".

use std::fmt::Write;

use crate::cache::{Entry, diff_why};
use crate::codegen::abi::{Entry as QueueEntry, StreamRun, encode};
use crate::cuda::cubin::KernelResources;
use crate::error::Fault;
use crate::ir::print::print_program;
use crate::manifest::Manifest;
use crate::model::config::describe;
use crate::target::{Target, TargetKind};
use crate::text::{nearest, one_of};
use crate::validate::Validated;

use super::Workspace;
use super::compile::{Compile, Compiler, Found, compile, find_cubin, stored_cubin};
use super::execute::{Devices, hardware_of, host};
use super::keys::{self, Keyed, WeightsId};
use super::prove::execution_keys;
use super::stages::{Generated, Placed, Site, generate_source, load_model, stored_source, subject};
use super::{import_stage, place_chosen};

/// What a build would do with one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained {
    /// Name of the target; empty for the import, which all targets share.
    pub target: String,
    pub stage: String,
    pub cached: bool,
    /// What changed since the last build, or why there is nothing to compare with; empty where nothing would run.
    pub lines: Vec<String>,
}

/// What [`show`] prints.
pub const SHOW_STAGES: [&str; 9] =
    ["manifest", "model", "program", "schedule", "source", "tables", "candidate", "resources", "why"];

/// Says for every stage whether a build would run it, and which line of its key changed. Runs nothing but the import of
/// headers, and the digest of weight files that nobody has read yet.
///
/// # Errors
/// Faults of the source or of the cache.
pub fn explain(workspace: &Workspace, manifest: &Manifest) -> Result<Vec<Explained>, Fault> {
    let model = load_model(workspace, manifest)?;
    let mut all = vec![explain_stage(workspace, "", &model.keyed, &subject(manifest, "model"))?.0];
    let devices = Devices::list(manifest.targets.iter().any(|target| target.kind == TargetKind::Cuda));
    let compiler = Compiler::new(workspace);
    for target in &manifest.targets {
        let site = Site::new(workspace, manifest, target, &model)?;
        explain_target(&site, &compiler, &devices, &mut all)?;
    }
    Ok(all)
}

fn explain_target(
    site: &Site<'_>,
    compiler: &Compiler<'_>,
    devices: &Devices,
    all: &mut Vec<Explained>,
) -> Result<(), Fault> {
    let (workspace, subject, name) = (site.workspace, site.subject(), site.target.name.as_str());
    let candidate = site.candidate();
    let tell = |all: &mut Vec<Explained>, keyed: &Keyed| -> Result<Option<Entry>, Fault> {
        let (explained, entry) = explain_stage(workspace, name, keyed, &subject)?;
        all.push(explained);
        Ok(entry)
    };
    let Some(schedule) = tell(all, &site.schedule_key(&candidate))?.map(|entry| entry.content()) else {
        let rest: &[&str] = match site.target.kind {
            TargetKind::Cpu => &[keys::PACK, keys::CHECK, keys::MEASURE],
            TargetKind::Cuda => &[keys::SOURCE, keys::COMPILE, keys::PACK, keys::CHECK, keys::MEASURE],
        };
        all.extend(rest.iter().map(|stage| follows(name, stage, keys::SCHEDULE)));
        return Ok(());
    };
    let (hardware, cubin) = match site.target.kind {
        TargetKind::Cpu => (host(), None),
        TargetKind::Cuda => {
            let Some(entry) = tell(all, &site.source_key(schedule))? else {
                let rest = [keys::COMPILE, keys::PACK, keys::CHECK, keys::MEASURE];
                all.extend(rest.iter().map(|stage| follows(name, stage, keys::SOURCE)));
                return Ok(());
            };
            let generated = Generated { source: stored_source(&entry)?, content: entry.content() };
            let compiled = match find_cubin(site, compiler, &generated)? {
                Ok(Found { keyed, nvrtc, .. }) => {
                    let entry = tell(all, &keyed)?;
                    entry.map(|entry| stored_cubin(&entry, nvrtc, None)).transpose()?
                }
                Err(missing) => {
                    all.push(waits(name, keys::COMPILE, missing.message.lines().next().unwrap_or_default()));
                    None
                }
            };
            match (compiled, devices.find(site.target)) {
                (Some(cubin), Ok(device)) => (hardware_of(device), Some(cubin.digest)),
                (None, Ok(_)) => {
                    let rest = [keys::PACK, keys::CHECK, keys::MEASURE];
                    all.extend(rest.iter().map(|stage| follows(name, stage, keys::COMPILE)));
                    return Ok(());
                }
                (_, Err(reason)) => {
                    let rest = [keys::PACK, keys::CHECK, keys::MEASURE];
                    all.extend(rest.iter().map(|stage| waits(name, stage, &reason)));
                    return Ok(());
                }
            }
        }
    };
    let weights = site.weights_id()?;
    if matches!(weights, WeightsId::Files(_)) {
        tell(all, &site.pack_key(schedule, &weights))?;
    }
    let (check, measure) = execution_keys(site, &candidate, schedule, &weights, cubin, &hardware);
    tell(all, &check)?;
    tell(all, &measure)?;
    Ok(())
}

fn follows(target: &str, stage: &str, before: &str) -> Explained {
    let lines = vec![format!("its input changes: {before} runs first")];
    Explained { target: target.to_string(), stage: stage.to_string(), cached: false, lines }
}

fn waits(target: &str, stage: &str, reason: &str) -> Explained {
    let lines = vec![format!("waits: {reason}")];
    Explained { target: target.to_string(), stage: stage.to_string(), cached: false, lines }
}

/// Compares a key with the one that the subject was last built from.
fn explain_stage(
    workspace: &Workspace,
    target: &str,
    keyed: &Keyed,
    subject: &str,
) -> Result<(Explained, Option<Entry>), Fault> {
    let entry = workspace.cache.get(keyed.stage, &keyed.key)?;
    let lines = match (&entry, workspace.cache.latest_why(keyed.stage, subject)) {
        (Some(_), _) => vec![],
        (None, None) => vec!["never built".to_string()],
        (None, Some((key, _))) if key == keyed.key => vec!["its entry is gone from the cache".to_string()],
        (None, Some((_, why))) => diff_why(&why, &keyed.why),
    };
    let explained =
        Explained { target: target.to_string(), stage: keyed.stage.to_string(), cached: entry.is_some(), lines };
    Ok((explained, entry))
}

/// The text of a stage for people; builds what it needs up to there.
///
/// # Errors
/// An unknown stage; a stage that the target does not have; faults of the stages before it.
pub fn show(workspace: &Workspace, manifest: &Manifest, target: &Target, stage: &str) -> Result<String, Fault> {
    if !SHOW_STAGES.contains(&stage) {
        let fault = Fault::input(format!("unknown stage `{stage}`: expected {}", one_of(SHOW_STAGES)));
        return Err(match nearest(stage, SHOW_STAGES) {
            Some(meant) => fault.with_remedy(format!("did you mean `{meant}`?")),
            None => fault,
        });
    }
    if stage == "manifest" {
        return Ok(format!("name {:?}\n{}", manifest.name, manifest.key_text()));
    }
    let model = import_stage(workspace, manifest)?;
    let site = Site::new(workspace, manifest, target, &model)?;
    match stage {
        "model" => Ok(format!("{}\n{}", describe(&model.imported.graph), model.graph_text)),
        "candidate" => Ok(format!("{}\n", site.candidate())),
        "program" => {
            let program = site.lower(&site.candidate()).map_err(|reason| Fault::input(reason.to_string()))?;
            Ok(print_program(&program))
        }
        "schedule" => place_chosen(&site)?.text(),
        "tables" => Ok(tables_text(place_chosen(&site)?.validated(target)?)),
        "source" => {
            needs_kernel(target, stage)?;
            Ok(generate_source(&site, &place_chosen(&site)?)?.source.text)
        }
        "resources" => {
            needs_kernel(target, stage)?;
            resources_text(&site, &place_chosen(&site)?)
        }
        _ => Ok(why_text(&site, &model.keyed)),
    }
}

fn needs_kernel(target: &Target, stage: &str) -> Result<(), Fault> {
    if target.kind == TargetKind::Cuda {
        return Ok(());
    }
    Err(Fault::input(format!("target `{}` has no `{stage}`: the interpreter runs its schedule", target.name))
        .with_remedy("name a CUDA target of the manifest"))
}

fn resources_text(site: &Site<'_>, placed: &Placed) -> Result<String, Fault> {
    let generated: Generated = generate_source(site, placed)?;
    let cubin = match compile(&Compiler::new(site.workspace), &[(*site, &generated)])?.pop() {
        Some(Compile::Done(cubin)) => cubin,
        Some(Compile::Waits(missing)) => return Err(missing),
        None => return Err(Fault::internal("a compile gave no result")),
    };
    let mut out = String::new();
    let _ = writeln!(out, "cubin {} of {} bytes, NVRTC {}", cubin.digest.short(), cubin.bytes.len(), cubin.nvrtc);
    for (kernel, resources) in &cubin.resources.kernels {
        let KernelResources {
            registers,
            stack_bytes,
            spill_store_bytes,
            spill_load_bytes,
            smem_static_bytes,
            barriers,
            code_bytes,
            parameter_bytes,
            ..
        } = resources;
        let _ = writeln!(
            out,
            "kernel {kernel}\n  {registers} registers a thread, {stack_bytes} bytes of stack, spills of {spill_store_bytes} bytes \
             stored and {spill_load_bytes} loaded\n  {smem_static_bytes} bytes of static shared memory, {barriers} barriers, \
             {code_bytes} bytes of code, {parameter_bytes} bytes of parameters"
        );
    }
    let machine = &placed.validated(site.target)?.schedule().machine;
    let smem = machine.smem.iter().map(|part| part.offset + part.bytes).max().unwrap_or(0);
    let threads = (machine.consumer_warps + machine.loader_warps) * 32;
    let _ =
        writeln!(out, "launch of {} blocks of {threads} threads, {smem} bytes of dynamic shared memory", machine.sms);
    Ok(out)
}

/// How long the queues and streams of each regime are.
fn tables_text(validated: &Validated) -> String {
    let schedule = validated.schedule();
    let mut out = String::new();
    for (r, regime) in schedule.regimes.iter().enumerate() {
        let _ = writeln!(
            out,
            "regime r{r} from position {}: {} tasks, {} events, {} SMs",
            regime.from_position,
            regime.tasks.len(),
            regime.events.len(),
            regime.queues.len()
        );
        let spread = |lengths: Vec<usize>| {
            let (least, most) = (lengths.iter().min().copied(), lengths.iter().max().copied());
            format!("{} to {}", least.unwrap_or(0), most.unwrap_or(0))
        };
        let _ = writeln!(out, "  tasks in a queue: {}", spread(regime.queues.iter().map(Vec::len).collect()));
        let _ = writeln!(out, "  runs in a stream: {}", spread(regime.streams.iter().map(Vec::len).collect()));
    }
    let layout = crate::pack::layout(schedule);
    let (least, most) = (layout.stream_bytes.iter().min().copied(), layout.stream_bytes.iter().max().copied());
    let (least, most) = (least.unwrap_or(0), most.unwrap_or(0));
    let _ = writeln!(out, "pack: {} bytes, {least} to {most} in a stream", layout.total_bytes);
    let tables = encode(validated);
    let _ = writeln!(
        out,
        "tables: {} entries of {} bytes, {} runs of {} bytes",
        tables.entries.len(),
        size_of::<QueueEntry>(),
        tables.runs.len(),
        size_of::<StreamRun>()
    );
    let _ = writeln!(out, "arenas: exchange {} bytes, cache {} bytes", tables.exchange_bytes, tables.cache_bytes);
    out
}

/// The key texts of the last build of this manifest and target, stage by stage.
fn why_text(site: &Site<'_>, import: &Keyed) -> String {
    let mut out = format!("[{}] {}\n{}", import.stage, import.key, import.why);
    for stage in [keys::SCHEDULE, keys::SOURCE, keys::COMPILE, keys::PACK, keys::CHECK, keys::MEASURE] {
        if let Some((key, why)) = site.workspace.cache.latest_why(stage, &site.subject()) {
            let _ = write!(out, "\n[{stage}] {key}\n{why}");
        }
    }
    out
}
