//! Owns the answers to "what would run, and why" and "what does this stage hold".

use std::fmt::Write;

use crate::cache::diff_why;
use crate::codegen::abi::{Entry as QueueEntry, StreamRun, encode};
use crate::codegen::emit::{Trace, emit};
use crate::codegen::waves;
use crate::cuda::cubin::KernelResources;
use crate::defaults::rows::{Room, STEP_ROWS};
use crate::error::Fault;
use crate::ir::layout::{pack_bytes, streamed_bytes};
use crate::ir::print::{print, print_program};
use crate::manifest::{Manifest, SearchKernel};
use crate::model::config::describe;
use crate::target::{Target, TargetKind};
use crate::text::{nearest, one_of};
use crate::validate::Validated;
use crate::waves::{Proven, STEP_ROWS_MIN, print as print_plans};

use super::Workspace;
use super::chain::{Chain, Host, NotMade, Stage};
use super::device_rows::{place_prompt_kernel, prove_kernel};
use super::device_steps::{StepsKernel, StepsKernels};
use super::device_waves::{PromptPlan, chosen_knobs, plan_prompts, plan_ragged, plan_steps};
use super::import_stage;
use super::invariant;
use super::keys::{self, Keyed};
use super::stages::{BuildContext, load_model, subject};

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
pub const SHOW_STAGES: [&str; 17] = [
    "manifest",
    "model",
    "program",
    "schedule",
    "source",
    "tables",
    "candidate",
    "resources",
    "why",
    "rows-schedule",
    "rows-source",
    "waves",
    "waves-source",
    "steps",
    "steps-source",
    "splits",
    "splits-source",
];

/// Stages of which there is a kernel for each number of rows.
const STEPS_STAGES: [&str; 4] = ["steps", "steps-source", "splits", "splits-source"];

/// Says for every stage whether a build would run it, and which line of its key changed. Runs nothing but the import of
/// headers, and the digest of weight files that were not read yet.
///
/// # Errors
/// Faults of the source or of the cache.
pub fn explain(workspace: &Workspace, manifest: &Manifest) -> Result<Vec<Explained>, Fault> {
    let model = load_model(workspace, manifest)?;
    let mut all = vec![explain_stage(workspace, "", &model.keyed, &subject(manifest, "model"))?];
    let host = Host::new(workspace);
    for target in &manifest.targets {
        let context = BuildContext::new(workspace, manifest, target, &model)?;
        explain_target(&Chain::looking(context, &host, context.candidate()), &mut all)?;
    }
    Ok(all)
}

fn explain_target(chain: &Chain<'_>, all: &mut Vec<Explained>) -> Result<(), Fault> {
    let context = &chain.context;
    let (name, subject) = (context.target.name.as_str(), context.subject());
    for &stage in Stage::of(context.target.kind) {
        all.push(match chain.key(stage) {
            Ok(None) => continue,
            Ok(Some(keyed)) => explain_stage(context.workspace, name, &keyed, &subject)?,
            Err(NotMade::NotStored(before)) => follows(name, stage, before),
            Err(NotMade::NoCompiler(_)) if stage != Stage::Compile => follows(name, stage, Stage::Compile),
            Err(NotMade::NoCompiler(missing)) => waits(name, stage, missing.message.lines().next().unwrap_or_default()),
            Err(NotMade::NoDevice { reason, .. }) => waits(name, stage, &reason),
            Err(other) => return Err(other.into()),
        });
    }
    Ok(())
}

fn follows(target: &str, stage: Stage, before: Stage) -> Explained {
    let lines = vec![format!("its input changes: {} runs first", before.name())];
    Explained { target: target.to_string(), stage: stage.name().to_string(), cached: false, lines }
}

fn waits(target: &str, stage: Stage, reason: &str) -> Explained {
    let lines = vec![format!("waits: {reason}")];
    Explained { target: target.to_string(), stage: stage.name().to_string(), cached: false, lines }
}

/// Compares a key with the one that the subject was last built from.
fn explain_stage(workspace: &Workspace, target: &str, keyed: &Keyed, subject: &str) -> Result<Explained, Fault> {
    let entry = workspace.cache.get(keyed.stage, &keyed.key)?;
    let lines = match (&entry, workspace.cache.latest_why(keyed.stage, subject)) {
        (Some(_), _) => vec![],
        (None, None) => vec!["never built".to_string()],
        (None, Some((key, _))) if key == keyed.key => vec!["its entry is gone from the cache".to_string()],
        (None, Some((_, why))) => diff_why(&why, &keyed.why),
    };
    Ok(Explained { target: target.to_string(), stage: keyed.stage.to_string(), cached: entry.is_some(), lines })
}

/// The text of a stage for people; builds what it needs up to there.
///
/// `rows`: of the stages in [`STEPS_STAGES`], the rows of the kernel that is shown; the fewest if there is none.
///
/// # Errors
/// An unknown stage; a stage that the target does not have; rows of which it has no kernel; faults of the stages before it.
pub fn show(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    stage: &str,
    rows: Option<u32>,
) -> Result<String, Fault> {
    if !SHOW_STAGES.contains(&stage) {
        let fault = Fault::input(format!("unknown stage `{stage}`: expected {}", one_of(SHOW_STAGES)));
        return Err(match nearest(stage, SHOW_STAGES) {
            Some(meant) => fault.with_remedy(format!("did you mean `{meant}`?")),
            None => fault,
        });
    }
    refuse_rows(manifest, target, stage, rows)?;
    if stage == "manifest" {
        return Ok(format!("name {:?}\n{}", manifest.name, manifest.key_text()));
    }
    if ["rows-source", "waves", "waves-source", "splits", "splits-source"].contains(&stage) {
        invariant::refuse(manifest, target, &format!("kernel for `show {stage}`"), "name `steps` or `steps-source`")?;
    }
    let model = import_stage(workspace, manifest)?;
    let context = BuildContext::new(workspace, manifest, target, &model)?;
    let host = Host::new(workspace);
    let chain = || Chain::chosen(context, &host);
    match stage {
        "model" => Ok(format!("{}\n{}", describe(&model.imported.graph), model.graph_text)),
        "candidate" => Ok(candidates_text(&context)),
        "program" => {
            let program = context.lower(&context.candidate()).map_err(|reason| Fault::input(reason.to_string()))?;
            Ok(print_program(&program))
        }
        "schedule" => Ok(chain()?.schedule()?.text()?),
        "tables" => Ok(tables_text(chain()?.validated()?)),
        "source" => {
            needs_kernel(target, stage)?;
            Ok(chain()?.source()?.source.text.clone())
        }
        "resources" => {
            needs_kernel(target, stage)?;
            Ok(resources_text(&chain()?)?)
        }
        "steps" if invariant::is_asked(manifest, target) => {
            let validated = alike_schedule(&context)?;
            let alike = invariant::plan(target, &validated)?;
            Ok(print_plans(validated.schedule(), alike.plans().iter().map(Proven::plan)))
        }
        "steps-source" if invariant::is_asked(manifest, target) => {
            let validated = alike_schedule(&context)?;
            let alike = invariant::plan(target, &validated)?;
            Ok(alike.plans().iter().map(|proven| waves::emit(proven, target, Trace::Off).text).collect())
        }
        "rows-schedule" if invariant::is_asked(manifest, target) => Ok(print(alike_schedule(&context)?.schedule())),
        "rows-schedule" => Ok(print(prompt_batch(&context)?.schedule())),
        "rows-source" => {
            needs_kernel(target, stage)?;
            Ok(emit(&prompt_batch(&context)?, target, Trace::Off).text)
        }
        "waves" => {
            let validated = prompt_batch(&context)?;
            Ok(waves_text(&validated, &chunk_plan(&context, &validated)?))
        }
        "waves-source" => {
            needs_kernel(target, stage)?;
            let validated = prompt_batch(&context)?;
            let plan = chunk_plan(&context, &validated)?;
            Ok(plan.all().into_iter().map(|(_, proven)| waves::emit(proven, target, Trace::Off).text).collect())
        }
        "steps" => {
            let StepsKernel { validated, rows, knobs, .. } = steps_batch(&context, rows)?;
            Ok(print_plans(validated.schedule(), [plan_steps(target, &validated, rows, &knobs)?.plan()]))
        }
        "steps-source" => {
            needs_kernel(target, stage)?;
            let StepsKernel { validated, rows, knobs, .. } = steps_batch(&context, rows)?;
            Ok(waves::emit(&plan_steps(target, &validated, rows, &knobs)?, target, Trace::Off).text)
        }
        "splits" => {
            let StepsKernel { validated, rows, .. } = steps_batch(&context, rows)?;
            Ok(print_plans(validated.schedule(), [plan_ragged(target, &validated, rows)?.plan()]))
        }
        "splits-source" => {
            needs_kernel(target, stage)?;
            let StepsKernel { validated, rows, .. } = steps_batch(&context, rows)?;
            Ok(waves::emit(&plan_ragged(target, &validated, rows)?, target, Trace::Off).text)
        }
        _ => Ok(why_text(&context, &model.keyed)),
    }
}

/// The candidate that is built, and a line for each wave kernel for which a search found knobs.
fn candidates_text(context: &BuildContext<'_>) -> String {
    let found = SearchKernel::ALL.into_iter().map(|kernel| (kernel, context.tuned_waves(kernel)));
    let found = found.filter(|(_, knobs)| !knobs.is_default());
    let waves: String = found.map(|(kernel, knobs)| format!("{kernel}: {knobs}\n")).collect();
    format!("{}\n{waves}", context.candidate())
}

/// The kernel that reads prompts, with room for one context of each row.
fn prompt_batch(context: &BuildContext<'_>) -> Result<Validated, Fault> {
    let context_max = u64::from(context.manifest.decode.context_max);
    let room = |rows| Room { rows, sequences: rows, positions: u64::from(rows) * context_max };
    prove_kernel(context, place_prompt_kernel(context, &context.candidate(), room)?)
}

/// How prompts are read in waves.
fn chunk_plan<'a>(context: &BuildContext<'_>, validated: &'a Validated) -> Result<PromptPlan<'a>, Fault> {
    let knobs = chosen_knobs(context, SearchKernel::Chunk, validated.schedule());
    plan_prompts(context.target, validated, &knobs)
}

/// Refuses rows for a stage that has no kernel for steps of several, and numbers for which there is none.
fn refuse_rows(manifest: &Manifest, target: &Target, stage: &str, rows: Option<u32>) -> Result<(), Fault> {
    let Some(rows) = rows else { return Ok(()) };
    if !STEPS_STAGES.contains(&stage) {
        let fault = Fault::input(format!("`show {stage}` has no kernel for steps of several rows"));
        return Err(fault.with_remedy(format!("leave `--rows` out, or name {}", one_of(STEPS_STAGES))));
    }
    if invariant::is_asked(manifest, target) {
        let fault = Fault::input("`batch_invariant` has its kernels shown together, whatever their rows".to_string());
        return Err(fault.with_remedy("leave `--rows` out"));
    }
    let kernels: Vec<u32> = STEP_ROWS.into_iter().filter(|rows| *rows >= STEP_ROWS_MIN).collect();
    if !kernels.contains(&rows) {
        let all: Vec<String> = kernels.iter().map(u32::to_string).collect();
        return Err(Fault::input(format!(
            "no wave kernel for steps of {rows} rows: expected {}",
            one_of(all.iter().map(String::as_str))
        )));
    }
    Ok(())
}

/// What runs steps of `rows` rows, with room for one context of each; of the fewest that wave kernels have if there is no number.
fn steps_batch(context: &BuildContext<'_>, rows: Option<u32>) -> Result<StepsKernel, Fault> {
    let rows = rows.unwrap_or(STEP_ROWS_MIN);
    let positions = u64::from(rows) * u64::from(context.manifest.decode.context_max);
    let room = Room { rows, sequences: rows, positions };
    StepsKernels::new(context, &context.candidate()).of(room)
}

/// The schedule of kernels that add up in one order, with room for one context.
fn alike_schedule(context: &BuildContext<'_>) -> Result<Validated, Fault> {
    let positions = u64::from(context.manifest.decode.context_max);
    invariant::schedule(context, &context.candidate(), Room { rows: 0, sequences: 1, positions })
}

/// The plan of chunks, and that of the tail or why there is none.
fn waves_text(validated: &Validated, plan: &PromptPlan<'_>) -> String {
    let mut out = print_plans(validated.schedule(), plan.all().into_iter().map(|(_, proven)| proven.plan()));
    if let PromptPlan::Chunks(_, refused) = plan {
        let _ = writeln!(out, "; no tail: {refused}");
    }
    out
}

fn needs_kernel(target: &Target, stage: &str) -> Result<(), Fault> {
    if target.kind == TargetKind::Cuda {
        return Ok(());
    }
    Err(Fault::input(format!("target `{}` has no `{stage}`: the interpreter runs its schedule", target.name))
        .with_remedy("name a CUDA target of the manifest"))
}

fn resources_text(chain: &Chain<'_>) -> Result<String, NotMade> {
    let cubin = chain.cubin()?.ok_or_else(|| Fault::internal("a target with a kernel has no cubin"))?;
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
    let machine = &chain.validated()?.schedule().machine;
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
    let streamed = streamed_bytes(schedule);
    let (least, most) = (streamed.iter().min().unwrap_or(&0), streamed.iter().max().unwrap_or(&0));
    let _ = writeln!(out, "pack: {} bytes, {least} to {most} of weights a step on an SM", pack_bytes(schedule));
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
fn why_text(context: &BuildContext<'_>, import: &Keyed) -> String {
    let mut out = format!("[{}] {}\n{}", import.stage, import.key, import.why);
    for stage in [keys::SCHEDULE, keys::SOURCE, keys::COMPILE, keys::PACK, keys::CHECK, keys::MEASURE] {
        if let Some((key, why)) = context.workspace.cache.latest_why(stage, &context.subject()) {
            let _ = write!(out, "\n[{stage}] {key}\n{why}");
        }
    }
    out
}
