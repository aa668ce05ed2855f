//! Owns the timing protocol: a checked kernel at some positions, alone and in turns with its baselines.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::abba::{self, Limits, Ratio, Round, percentile};
use crate::check::{self, Checked, Figures, check_cpu, check_cuda};
use crate::codegen::emit::{Trace, emit};
use crate::cuda::driver::Device;
use crate::cuda::session::Session;
use crate::dtype::DType;
use crate::error::Fault;
use crate::files::read_text;
use crate::format::name_of;
use crate::interp::Pack;
use crate::ir::parse::parse_with_lines;
use crate::manifest::Manifest;
use crate::measure::{self, Timed, Timer, Withheld};
use crate::target::Target;
use crate::text::Style;
use crate::validate::{Validated, validate};

pub use super::baseline::Work;
use super::baseline::{BaselineProgram, Opened};
use super::chain::{Chain, Host};
use super::evaluate::Executor;
use super::execute::load_session;
use super::invariant;
use super::stages::{BuildContext, Generated, memory_pack};
use super::{Workspace, import_stage};

/// Launches of our own at each position, beyond those of the comparisons.
const SAMPLES: usize = 30;
/// Largest schedule that is read as a baseline.
const SCHEDULE_BYTES_MAX: u64 = 1 << 30;

/// Something to compare with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Baseline {
    /// PyTorch's decode step at the shapes of the manifest's config.
    Torch,
    /// A schedule in text form for the same model, proven, compiled and run in this process.
    Schedule(PathBuf),
    /// A program that speaks the protocol of `docs/bench.md`.
    Command(String),
}

impl std::fmt::Display for Baseline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Baseline::Torch => f.write_str("torch"),
            Baseline::Schedule(path) => write!(f, "{}", path.display()),
            Baseline::Command(line) => f.write_str(line),
        }
    }
}

/// What is to be timed, and for how long.
pub struct Request {
    pub baselines: Vec<Baseline>,
    /// Those of each comparison at each position.
    pub limits: Limits,
    /// How long a program may take for one answer.
    pub baseline_timeout: Duration,
}

/// What is said before any figure.
pub struct Subject {
    pub target: String,
    /// `NVIDIA H200`, or the model of the CPU.
    pub hardware: String,
    /// Release of the driver; empty for the CPU.
    pub driver: String,
    pub precision: String,
    /// The verdict: only what was checked is timed.
    pub checked: Figures,
    /// The read peak in bytes per second; `None` if the target was not calibrated.
    pub read_bytes_per_s: Option<f64>,
}

/// Our own time at one position.
pub type Own = Result<Timed, Withheld>;

/// A baseline at one position.
pub struct Versus {
    pub baseline: String,
    pub variant: String,
    /// Why there is no figure, as text: the other comparisons go on.
    pub outcome: Result<Compared, String>,
}

/// A baseline that took `ratio` times as long as we did.
pub struct Compared {
    pub latency_us_p10: f64,
    pub latency_us_p50: f64,
    pub latency_us_p90: f64,
    pub ratio: Ratio,
}

/// What a benchmark found, in the order in which it is found.
pub enum Found<'a> {
    Subject(&'a Subject),
    Own(&'a Own),
    Versus { position: u32, versus: &'a Versus },
}

/// Builds what is not built, checks it, and times it at the manifest's positions, alone and against each baseline.
///
/// # Errors
/// Faults of the build; no device of the target's kind; a baseline that cannot be started. One that fails later is
/// told in its [`Versus`].
pub fn bench(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    request: &Request,
    on_found: &mut dyn FnMut(Found<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    invariant::refuse(manifest, target, "kernel for one row to time", "time steps with `--rows`, as in `--rows 1`")?;
    let model = import_stage(workspace, manifest)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    let executor = Executor::new(&chain)?;
    let mut session = None;
    let (checked, _) = executor.checked(&mut session)?;
    let hardware = executor.hardware();
    let precision = manifest.precision;
    on_found(Found::Subject(&Subject {
        target: target.name.clone(),
        hardware: hardware.name.clone(),
        driver: hardware.driver.clone(),
        precision: format!("{} weights, {} cache", precision.weights, precision.cache),
        checked: checked.figures(),
        read_bytes_per_s: manifest.measured(target).read_bytes_per_s,
    }))?;

    // A baseline that cannot start is known before anything is timed.
    let mut programs = Programs::open(&chain, &hardware.uuid, request)?;
    let schedules = request.baselines.iter().filter_map(|baseline| match baseline {
        Baseline::Schedule(path) => Some(path),
        Baseline::Torch | Baseline::Command(_) => None,
    });
    let mut rivals = schedules.map(|path| Rival::load(&chain, path)).collect::<Result<Vec<_>, Fault>>()?;
    let mut rivals = rivals.iter_mut().map(|rival| rival.timer(&chain.context)).collect::<Result<Vec<_>, Fault>>()?;

    let mut timer = executor.timer(&mut session, &checked)?;
    for &position in &manifest.decode.time_positions {
        timer.prepare(position)?;
        let samples = (0..SAMPLES).map(|_| timer.launch()).collect::<Result<Vec<f64>, _>>()?;
        let own = timer.timed(samples);
        on_found(Found::Own(&own))?;
        if own.is_err() {
            continue;
        }
        for (name, rival) in &mut rivals {
            let outcome = against_rival(request.limits, &mut timer, rival, position)?;
            let versus = Versus { baseline: name.clone(), variant: "schedule".to_string(), outcome };
            on_found(Found::Versus { position, versus: &versus })?;
        }
        let (steps, work) = (timer.steps(), Work::Step { rows: 1, position });
        programs.against(work, steps, &mut || timer.launch().map_err(Fault::from), &mut |versus| {
            on_found(Found::Versus { position, versus })
        })?;
    }
    Ok(())
}

fn against_rival(
    limits: Limits,
    own: &mut Timer<'_>,
    rival: &mut Timer<'_>,
    position: u32,
) -> Result<Result<Compared, String>, Fault> {
    rival.prepare(position)?;
    let mut sides = (own, rival);
    Ok(compared(&abba::rounds(limits, &mut sides, |sides| sides.0.launch(), |sides| sides.1.launch())?))
}

/// The baselines that are programs of their own.
pub(super) struct Programs<'a> {
    workspace: &'a Workspace,
    limits: Limits,
    all: Vec<Program>,
}

/// A baseline in another process, which said what it is.
struct Program {
    /// The name that the user gave.
    name: String,
    process: BaselineProgram,
    opened: Opened,
}

impl<'a> Programs<'a> {
    /// Starts the programs of `request` and tells them the model. `uuid` names the device that both sides use.
    ///
    /// # Errors
    /// A program that cannot be started, or refuses the model.
    pub fn open(chain: &Chain<'a>, uuid: &str, request: &Request) -> Result<Programs<'a>, Fault> {
        let BuildContext { workspace, manifest, imported, .. } = chain.context;
        let config = config_file(&imported.config_text)?;
        let dtype = if manifest.precision.weights == DType::Bf16 { "bf16" } else { "fp32" };
        let experts = manifest.formats.experts.map(name_of);
        let (uuid, timeout) = (Some(uuid).filter(|uuid| !uuid.is_empty()), request.baseline_timeout);
        let mut all = vec![];
        for baseline in &request.baselines {
            let mut process = match baseline {
                Baseline::Torch => BaselineProgram::torch(uuid, timeout)?,
                Baseline::Command(line) => BaselineProgram::command(line, uuid, timeout)?,
                Baseline::Schedule(_) => continue,
            };
            let name = baseline.to_string();
            let opened = process.open(config.path(), dtype, experts.as_deref(), manifest.decode.context_max)?;
            workspace.report.note(&format!("baseline {name}: {}", opened.name));
            all.push(Program { name, process, opened });
        }
        Ok(Programs { workspace, limits: request.limits, all })
    }

    /// Each variant of each program takes turns with `own`, whose figure is the microseconds of one step of a launch of `steps`, or of one
    /// prompt. Why a program has no figure is text, because the other comparisons go on.
    ///
    /// # Errors
    /// What `on_versus` says.
    pub fn against(
        &mut self,
        work: Work,
        steps: u32,
        own: &mut dyn FnMut() -> Result<f64, Fault>,
        on_versus: &mut dyn FnMut(&Versus) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        for Program { name, process, opened } in &mut self.all {
            for variant in &opened.variants {
                self.workspace.report.note(&format!("{name} {variant}: preparing {work}"));
                let outcome = against_program(self.limits, process, variant, work, steps, own);
                on_versus(&Versus { baseline: name.clone(), variant: variant.clone(), outcome })?;
            }
        }
        Ok(())
    }
}

fn against_program(
    limits: Limits,
    process: &mut BaselineProgram,
    variant: &str,
    work: Work,
    steps: u32,
    own: &mut dyn FnMut() -> Result<f64, Fault>,
) -> Result<Compared, String> {
    process.prepare(variant, work).map_err(|error| error.to_string())?;
    let mut sides = (own, process);
    let rounds =
        abba::rounds(limits, &mut sides, |(own, _)| own(), |(_, process)| process.time(steps).map_err(Fault::from));
    compared(&rounds.map_err(|fault| fault.message)?)
}

/// Answers as a baseline until there is no further question: the other side of [`bench`].
///
/// # Errors
/// As [`bench`]; a question that is no JSON; whatever `answer` says.
pub fn serve(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    questions: impl Iterator<Item = String>,
    mut answer: impl FnMut(&Value) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let model = import_stage(workspace, manifest)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    let executor = Executor::new(&chain)?;
    let mut session = None;
    let (checked, _) = executor.checked(&mut session)?;
    let mut timer = executor.timer(&mut session, &checked)?;
    for line in questions {
        let question: Value = serde_json::from_str(&line)
            .map_err(|error| Fault::input(format!("expected a question in JSON, found `{line}`: {error}")))?;
        answer(&match question["do"].as_str() {
            Some("open") => {
                let name = format!("monobloc {} on {}", env!("CARGO_PKG_VERSION"), executor.hardware().name);
                json!({ "name": name, "variants": [target.name] })
            }
            Some("prepare")
                if question["rows"].as_u64().is_some_and(|rows| rows != 1) || !question["prompt"].is_null() =>
            {
                json!({ "error": "this baseline times steps of one row" })
            }
            Some("prepare") => {
                let position = question["position"].as_u64().and_then(|position| u32::try_from(position).ok());
                let room = manifest.decode.context_max.saturating_sub(manifest.decode.steps_per_launch);
                match position.filter(|&position| position <= room) {
                    Some(position) => {
                        timer.prepare(position)?;
                        json!({})
                    }
                    None => json!({ "error": format!("expected a position up to {room}") }),
                }
            }
            // A time per step, so the number of steps of a launch may differ from the other side's.
            Some("time") => json!({ "us_per_step": timer.launch()? }),
            _ => json!({ "error": "expected `open`, `prepare` or `time`" }),
        })?;
    }
    Ok(())
}

fn compared(rounds: &[Round]) -> Result<Compared, String> {
    let ratio = abba::ratio(rounds).ok_or("its times are no positive numbers")?;
    let mut latency_us: Vec<f64> = rounds.iter().flat_map(|round| round.b).collect();
    latency_us.sort_by(f64::total_cmp);
    Ok(Compared {
        latency_us_p10: percentile(&latency_us, 0.1),
        latency_us_p50: percentile(&latency_us, 0.5),
        latency_us_p90: percentile(&latency_us, 0.9),
        ratio,
    })
}

/// The config as a file: that of a checkpoint lies in a folder with much else.
fn config_file(text: &str) -> Result<tempfile::NamedTempFile, Fault> {
    let write = || -> std::io::Result<_> {
        let mut file = tempfile::Builder::new().prefix("monobloc-config-").suffix(".json").tempfile()?;
        file.write_all(text.as_bytes())?;
        file.flush()?;
        Ok(file)
    };
    write().map_err(|error| Fault::environment(format!("no temporary file can be written: {error}")))
}

/// A schedule in text form that runs in this process.
struct Rival {
    name: String,
    validated: Validated,
    checked: Checked,
    pack: Pack,
    on: Option<(Device, Session)>,
}

impl Rival {
    /// Proves, compiles, packs and checks it, as anything that is timed.
    fn load(chain: &Chain<'_>, path: &Path) -> Result<Rival, Fault> {
        let BuildContext { workspace, manifest, target, imported, .. } = chain.context;
        let name = path.display().to_string();
        let text = read_text(path, SCHEDULE_BYTES_MAX)?;
        let (schedule, _) = parse_with_lines(&text).map_err(|error| error.into_fault(&name, &text, Style::Plain))?;
        let validated = validate(schedule, target).map_err(|rejected| {
            let message = Fault::from(rejected).message;
            Fault::input(format!("`{name}` is not proven for target `{}`: {message}", target.name))
                .with_remedy("`monobloc validate` shows every violation on its line")
        })?;
        let pack = memory_pack(&chain.context, &validated)?;
        let positions = &manifest.decode.check_positions;
        let subject = check::Subject {
            validated: &validated,
            target,
            graph: &imported.graph,
            weights: &imported.weights,
            pack: pack.clone(),
            positions,
            alone: None,
        };
        let failed = |error: check::CheckError| {
            let fault = Fault::from(error);
            Fault { message: format!("baseline `{name}`: {}", fault.message), ..fault }
        };
        let (checked, on) = match chain.host.device(target)? {
            None => (check_cpu(&subject, &|| {}).map_err(failed)?, None),
            Some(found) => {
                let source = emit(&validated, target, Trace::Off);
                let generated = Generated::of(source);
                let cubin = chain.compile(&generated)?;
                let device = Device::open(found.ordinal)?;
                let steps_max = manifest.decode.steps_per_launch;
                let mut session =
                    load_session(workspace, &device, &validated, &cubin.bytes, &pack, Trace::Off, steps_max)?;
                (check_cuda(&subject, &mut session, steps_max, &|| {}).map_err(failed)?, Some((device, session)))
            }
        };
        Ok(Rival { name, validated, checked, pack, on })
    }

    fn timer<'a>(&'a mut self, context: &BuildContext<'a>) -> Result<(String, Timer<'a>), Fault> {
        let Rival { name, validated, checked, pack, on } = self;
        let subject = measure::Subject {
            validated,
            graph: &context.imported.graph,
            target: context.target,
            read_bytes_per_s: context.manifest.measured(context.target).read_bytes_per_s,
            positions: &context.manifest.decode.time_positions,
            steps_per_launch: context.manifest.decode.steps_per_launch,
        };
        let timer = match on {
            None => Timer::cpu(subject, checked, pack.clone())?,
            Some((device, session)) => Timer::cuda(subject, checked, device, session),
        };
        Ok((name.clone(), timer))
    }
}
