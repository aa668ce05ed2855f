//! Owns the stages that execute a chain: check, then measure, each once for a schedule, its weights and the hardware.

use std::cell::OnceCell;
use std::time::Instant;

use crate::cache::{Entry, Outcome};
use crate::check::{self, CheckError, Checked, check_cpu, check_cuda, expect_steps};
use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::session::Session;
use crate::error::{Fault, Tier};
use crate::flywheel::Origin;
use crate::interp::Pack;
use crate::measure::{self, Measurement, Timer};
use crate::text::counted;

use super::chain::{Chain, NotMade};
use super::compile::Cubin;
use super::execute::{self, load_session};
use super::keys::{self, Hardware, Keyed};
use super::rows::{Failure, TrialRow, verdicts};
use super::stages::BuildContext;

/// Packs, checks and measures.
///
/// # Errors
/// What the chain lacks, a schedule that computes something else, a full disk.
pub(super) fn evaluate(chain: &Chain<'_>) -> Result<Measurement, NotMade> {
    let executor = Executor::new(chain)?;
    let context = &chain.context;
    let mut session = None;
    let (checked, check_ms) = executor.checked(&mut session)?;

    let (_, measure_key) = executor.keys()?;
    let positions = &context.manifest.decode.time_positions;
    let detail = format!("{} on {}", counted(positions.len() as u64, "position"), executor.hardware.name);
    let title = context.title(keys::MEASURE);
    let (entry, outcome) = context.workspace.stage(&measure_key, &context.subject(), &title, &detail, || {
        let started = Instant::now();
        let measurement = executor.measure(&mut session, &checked)?;
        let took_ms = started.elapsed().as_secs_f64() * 1e3;
        // Before the entry is stored: a process killed in between then repeats the row, and does not lose it.
        executor.row().append(check_ms, Some(took_ms), verdicts(checked.figures(), &measurement))?;
        Ok::<_, Fault>(measurement.to_entry())
    })?;
    let measurement = Measurement::from_entry(&entry.bytes()?).ok_or_else(|| unreadable(&entry))?;
    if outcome == Outcome::Built {
        tell(context, &measurement);
    }
    Ok(measurement)
}

/// Makes sure that the numbers of a chain were checked on this kind of hardware.
///
/// # Errors
/// What the chain lacks; a schedule that computes something else.
pub(super) fn ensure_checked(chain: &Chain<'_>) -> Result<(), Fault> {
    let executor = Executor::new(chain)?;
    let (target, kind) = (&chain.context.target.name, &executor.hardware().name);
    executor.checked(&mut None).map(drop).map_err(|fault| match fault.tier {
        Tier::Internal => {
            let message = format!("kernel `decode` of target `{target}` on {kind}: {}", fault.message);
            Fault { message, ..fault }
                .with_remedy("no token was computed by it; report this with the output of `monobloc show schedule`")
        }
        _ => fault,
    })
}

fn tell(context: &BuildContext<'_>, measurement: &Measurement) {
    for timed in measurement.timed() {
        let floor = timed.floor_us.map(|floor| format!(", floor {floor:.1} µs")).unwrap_or_default();
        context.workspace.report.note(&format!(
            "{}: {:.1} µs per token at position {} ({:.0} tokens/s{floor})",
            context.target.name,
            timed.latency_us_p50,
            timed.position,
            1e6 / timed.latency_us_p50
        ));
    }
    for withheld in measurement.withheld() {
        context.workspace.report.note(&format!("{}: withheld: {}", context.target.name, withheld.reason));
    }
}

fn unreadable(entry: &Entry) -> Fault {
    Fault::internal(format!("the stored result `{}` cannot be read", entry.path().display()))
}

/// What went wrong while something ran: a verdict about the schedule, or anything else.
enum Unchecked {
    Check(CheckError),
    Fault(Fault),
}

impl From<Fault> for Unchecked {
    fn from(fault: Fault) -> Unchecked {
        Unchecked::Fault(fault)
    }
}

/// A chain with what executes it; opens pack and device when the first stage needs them.
pub(super) struct Executor<'a> {
    chain: &'a Chain<'a>,
    /// The kernel and the device that runs it; `None` for the CPU.
    on: Option<(&'a Cubin, &'a DeviceIdentity)>,
    hardware: Hardware,
    pack: OnceCell<Pack>,
}

impl<'a> Executor<'a> {
    /// Makes the kernel, finds the device, and packs the weights of a checkpoint.
    ///
    /// # Errors
    /// What the chain lacks: a compiler first, then a device.
    pub fn new(chain: &'a Chain<'a>) -> Result<Executor<'a>, NotMade> {
        let cubin = chain.cubin()?;
        let on = cubin.zip(chain.host.device(chain.context.target)?);
        let hardware = chain.host.hardware(chain.context.target)?;
        chain.stored_pack()?;
        Ok(Executor { chain, on, hardware, pack: OnceCell::new() })
    }

    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    fn keys(&self) -> Result<(Keyed, Keyed), NotMade> {
        self.chain.execution_keys(&self.hardware)
    }

    fn row(&self) -> TrialRow<'_> {
        TrialRow {
            chain: self.chain,
            wave: None,
            hardware: Some(&self.hardware),
            origin: Origin::default(),
            asked: None,
        }
    }

    /// Checks the numbers, unless they were checked on this hardware before. Also the milliseconds that it took now.
    pub fn checked(&self, session: &mut Option<(Device, Session)>) -> Result<(Checked, Option<f64>), Fault> {
        let context = &self.chain.context;
        let (check_key, _) = self.keys()?;
        let mut check_ms = None;
        let positions = &context.manifest.decode.check_positions;
        let detail = format!("{} on {}", counted(positions.len() as u64, "position"), self.hardware.name);
        let (entry, _) =
            context.workspace.stage(&check_key, &context.subject(), &context.title(keys::CHECK), &detail, || {
                let started = Instant::now();
                let checked = self.check(session);
                let took_ms = started.elapsed().as_secs_f64() * 1e3;
                check_ms = Some(took_ms);
                match checked {
                    Ok(checked) => Ok(checked.to_entry()),
                    Err(Unchecked::Fault(fault)) => Err(fault),
                    // A checkpoint's fault says nothing about a candidate.
                    Err(Unchecked::Check(error @ CheckError::Weight { .. })) => Err(error.into()),
                    Err(Unchecked::Check(error)) => {
                        let verdict = Failure::of(&error).verdict(error.to_string(), error.figures());
                        self.row().append(Some(took_ms), None, vec![verdict])?;
                        Err(error.into())
                    }
                }
            })?;
        let checked = Checked::from_entry(&entry.bytes()?).ok_or_else(|| unreadable(&entry))?;
        Ok((checked, check_ms))
    }

    /// What is timed: the schedule at the positions of the manifest.
    fn subject(&self) -> Result<measure::Subject<'_>, Fault> {
        let BuildContext { imported, target, manifest, .. } = self.chain.context;
        Ok(measure::Subject {
            validated: self.chain.validated().map_err(Fault::from)?,
            graph: &imported.graph,
            target,
            read_bytes_per_s: manifest.measured(target).read_bytes_per_s,
            positions: &manifest.decode.time_positions,
            steps_per_launch: manifest.decode.steps_per_launch,
        })
    }

    /// What times it; the session stays in `session`.
    pub fn timer<'s>(
        &'s self,
        session: &'s mut Option<(Device, Session)>,
        checked: &Checked,
    ) -> Result<Timer<'s>, Fault> {
        let subject = self.subject()?;
        match self.on {
            None => Ok(Timer::cpu(subject, checked, self.pack()?)?),
            Some(on) => {
                let (device, session) = self.session(on, session)?;
                Ok(Timer::cuda(subject, checked, device, session))
            }
        }
    }

    fn pack(&self) -> Result<Pack, Fault> {
        if let Some(pack) = self.pack.get() {
            return Ok(pack.clone());
        }
        let pack = self.chain.pack()?;
        Ok(self.pack.get_or_init(|| pack).clone())
    }

    /// The session of the device, loaded once for check and measure.
    fn session<'s>(
        &self,
        (cubin, found): (&Cubin, &DeviceIdentity),
        session: &'s mut Option<(Device, Session)>,
    ) -> Result<&'s mut (Device, Session), Fault> {
        if session.is_none() {
            let device = execute::open(found, self.chain.context.target)?;
            let (workspace, steps_max) = (self.chain.context.workspace, self.steps_max());
            let (validated, pack) = (self.chain.validated()?, self.pack()?);
            let loaded = load_session(workspace, &device, validated, &cubin.bytes, &pack, Trace::Off, steps_max)?;
            *session = Some((device, loaded));
        }
        session.as_mut().ok_or_else(|| Fault::internal("a session was loaded and is gone"))
    }

    fn steps_max(&self) -> u32 {
        self.chain.context.manifest.decode.steps_per_launch
    }

    fn check(&self, session: &mut Option<(Device, Session)>) -> Result<Checked, Unchecked> {
        let BuildContext { imported, target, manifest, .. } = self.chain.context;
        let subject = check::Subject {
            validated: self.chain.validated().map_err(Fault::from)?,
            target,
            graph: &imported.graph,
            weights: &imported.weights,
            pack: self.pack()?,
            positions: &manifest.decode.check_positions,
            alone: None,
        };
        let steps = expect_steps(&subject, self.on.is_some());
        let progress = self.chain.context.workspace.report.bar("steps of the reference", steps);
        let on_step = || progress.inc(1);
        let checked = match self.on {
            None => check_cpu(&subject, &on_step),
            Some(on) => {
                let (_, session) = self.session(on, session)?;
                check_cuda(&subject, session, self.steps_max(), &on_step)
            }
        };
        checked.map_err(Unchecked::Check)
    }

    fn measure(&self, session: &mut Option<(Device, Session)>, checked: &Checked) -> Result<Measurement, Fault> {
        let BuildContext { manifest, workspace, .. } = self.chain.context;
        let timer = self.timer(session, checked)?;
        let progress = workspace.report.bar("positions timed", manifest.decode.time_positions.len() as u64);
        Ok(timer.measure(&|| progress.inc(1))?)
    }
}
