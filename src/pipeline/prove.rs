//! Owns the stages that execute: check, then measure, each once for a schedule, its weights and the hardware.

use std::cell::OnceCell;
use std::time::Instant;

use crate::cache::{Entry, Outcome};
use crate::check::{self, CheckError, Checked, check_cpu, check_cuda};
use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::session::{Session, SessionError};
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::Verdict;
use crate::interp::Pack;
use crate::measure::{self, Measurement, Timer};

use super::compile::Cubin;
use super::execute::{hardware_of, host, load_session};
use super::keys::{self, CheckKey, Hardware, Keyed, MeasureKey, SubjectKey, WeightsId};
use super::rows::{Tried, check_figures, verdicts};
use super::stages::{Placed, Site, open_pack, store_pack};

/// A kernel and the device that is here to run it.
pub(super) struct OnDevice<'a> {
    pub cubin: &'a Cubin,
    pub source: Digest,
    pub device: &'a DeviceIdentity,
}

/// Keys of check and measure.
pub(super) fn execution_keys(
    site: &Site<'_>,
    candidate: &crate::candidate::Candidate,
    schedule: Digest,
    weights: &WeightsId,
    cubin: Option<Digest>,
    hardware: &Hardware,
) -> (Keyed, Keyed) {
    let Site { graph, target, manifest, .. } = *site;
    let subject = SubjectKey { schedule, graph, weights, candidate, target, cubin, hardware };
    let decode = &manifest.decode;
    let check = CheckKey {
        subject: &subject,
        positions: &decode.check_positions,
        steps_per_launch: cubin.map(|_| decode.steps_per_launch),
    };
    let measure =
        MeasureKey { subject: &subject, positions: &decode.time_positions, steps_per_launch: decode.steps_per_launch };
    (check.keyed(), measure.keyed())
}

/// Packs, checks and measures. `on` is `None` for the CPU.
pub(super) fn prove(site: &Site<'_>, placed: &Placed, on: Option<OnDevice<'_>>) -> Result<Measurement, Fault> {
    let executor = Executor::new(*site, placed, on)?;
    let mut session = None;
    let (checked, check_ms) = executor.checked(&mut session)?;

    let (_, measure_key) = executor.keys();
    let positions = &site.manifest.decode.time_positions;
    let detail = format!("{} positions on {}", positions.len(), executor.hardware.name);
    let (entry, outcome) =
        site.workspace.stage(&measure_key, &site.subject(), &site.title(keys::MEASURE), &detail, || {
            let started = Instant::now();
            let measurement = executor.measure(&mut session, &checked)?;
            let took_ms = started.elapsed().as_secs_f64() * 1e3;
            // Before the entry: a row that is there twice is a repetition, a row that is lost is lost.
            executor.tried().append(check_ms, Some(took_ms), verdicts(checked.figures(), &measurement))?;
            Ok(measurement.to_entry())
        })?;
    let measurement = Measurement::from_entry(&entry.bytes()?).ok_or_else(|| unreadable(&entry))?;
    if outcome == Outcome::Built {
        tell(site, &measurement);
    }
    Ok(measurement)
}

fn tell(site: &Site<'_>, measurement: &Measurement) {
    for timed in measurement.timed() {
        let floor = timed.floor_us.map(|floor| format!(", floor {floor:.1} µs")).unwrap_or_default();
        site.workspace.report.note(&format!(
            "{}: {:.1} µs per token at position {} ({:.0} tokens/s{floor})",
            site.target.name,
            timed.latency_us_p50,
            timed.position,
            1e6 / timed.latency_us_p50
        ));
    }
    for withheld in measurement.withheld() {
        site.workspace.report.note(&format!("{}: withheld: {}", site.target.name, withheld.reason));
    }
}

fn unreadable(entry: &Entry) -> Fault {
    Fault::internal(format!("the stored result `{}` cannot be read", entry.path().display()))
}

fn failed(error: &CheckError) -> Verdict {
    let check = error.figures().map(check_figures);
    let detail = error.to_string();
    match error {
        CheckError::Session(SessionError::Hung { .. } | SessionError::Lost) => Verdict::Timeout { detail, check },
        CheckError::Session(SessionError::Driver(driver)) if driver.is_crash() => Verdict::Crash { detail, check },
        _ => Verdict::Fail { detail, check },
    }
}

/// What went wrong while something ran: a verdict about the schedule, or anything else.
enum Ran {
    Check(CheckError),
    Fault(Fault),
}

impl From<Fault> for Ran {
    fn from(fault: Fault) -> Ran {
        Ran::Fault(fault)
    }
}

/// A placed schedule with what executes it; opens pack and device when the first stage needs them.
pub(super) struct Executor<'a> {
    site: Site<'a>,
    placed: &'a Placed,
    on: Option<OnDevice<'a>>,
    weights: WeightsId,
    stored: Option<Entry>,
    hardware: Hardware,
    pack: OnceCell<Pack>,
}

impl<'a> Executor<'a> {
    /// Packs the weights of a checkpoint, through the cache. `on` is `None` for the CPU.
    pub fn new(site: Site<'a>, placed: &'a Placed, on: Option<OnDevice<'a>>) -> Result<Executor<'a>, Fault> {
        let weights = site.weights_id()?;
        let stored = store_pack(&site, placed, &weights)?;
        let hardware = on.as_ref().map_or_else(host, |on| hardware_of(on.device));
        Ok(Executor { site, placed, on, weights, stored, hardware, pack: OnceCell::new() })
    }

    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    fn keys(&self) -> (Keyed, Keyed) {
        let Executor { site, placed, on, weights, hardware, .. } = self;
        let cubin = on.as_ref().map(|on| on.cubin.digest);
        execution_keys(site, &placed.candidate, placed.content, weights, cubin, hardware)
    }

    fn tried(&self) -> Tried<'_> {
        let on = self.on.as_ref();
        Tried {
            site: &self.site,
            candidate: &self.placed.candidate,
            placed: Some(self.placed),
            source: on.map(|on| on.source),
            cubin: on.map(|on| on.cubin),
            hardware: Some(&self.hardware),
            asked: None,
        }
    }

    /// Checks the numbers, unless they were checked on this hardware before. Also the milliseconds that it took now.
    pub fn checked(&self, session: &mut Option<(Device, Session)>) -> Result<(Checked, Option<f64>), Fault> {
        let site = &self.site;
        let (check_key, _) = self.keys();
        let mut check_ms = None;
        let positions = &site.manifest.decode.check_positions;
        let detail = format!("{} positions on {}", positions.len(), self.hardware.name);
        let (entry, _) =
            site.workspace.stage(&check_key, &site.subject(), &site.title(keys::CHECK), &detail, || {
                let started = Instant::now();
                let checked = self.check(session);
                let took_ms = started.elapsed().as_secs_f64() * 1e3;
                check_ms = Some(took_ms);
                match checked {
                    Ok(checked) => Ok(checked.to_entry()),
                    Err(Ran::Fault(fault)) => Err(fault),
                    // A checkpoint's fault says nothing about a candidate.
                    Err(Ran::Check(error @ CheckError::Weight { .. })) => Err(error.into()),
                    Err(Ran::Check(error)) => {
                        self.tried().append(Some(took_ms), None, vec![failed(&error)])?;
                        Err(error.into())
                    }
                }
            })?;
        let checked = Checked::from_entry(&entry.bytes()?).ok_or_else(|| unreadable(&entry))?;
        Ok((checked, check_ms))
    }

    /// What is timed: the schedule at the positions of the manifest.
    fn subject(&self) -> Result<measure::Subject<'_>, Fault> {
        let Site { imported, target, manifest, .. } = self.site;
        Ok(measure::Subject {
            validated: self.placed.validated(target)?,
            graph: &imported.graph,
            target,
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
        match &self.on {
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
        let pack = open_pack(&self.site, self.placed, self.stored.as_ref())?;
        Ok(self.pack.get_or_init(|| pack).clone())
    }

    /// The session of the device, loaded once for check and measure.
    fn session<'s>(
        &self,
        on: &OnDevice<'_>,
        session: &'s mut Option<(Device, Session)>,
    ) -> Result<&'s mut (Device, Session), Fault> {
        if session.is_none() {
            let device = Device::open(on.device.ordinal)?;
            let validated = self.placed.validated(self.site.target)?;
            let steps_max = self.steps_max();
            let loaded = load_session(
                self.site.workspace,
                &device,
                validated,
                &on.cubin.bytes,
                &self.pack()?,
                Trace::Off,
                steps_max,
            )?;
            *session = Some((device, loaded));
        }
        session.as_mut().ok_or_else(|| Fault::internal("a session was loaded and is gone"))
    }

    fn steps_max(&self) -> u32 {
        self.site.manifest.decode.steps_per_launch
    }

    fn check(&self, session: &mut Option<(Device, Session)>) -> Result<Checked, Ran> {
        let Site { imported, target, manifest, .. } = self.site;
        let subject = check::Subject {
            validated: self.placed.validated(target)?,
            target,
            graph: &imported.graph,
            weights: &imported.weights,
            pack: self.pack()?,
            positions: &manifest.decode.check_positions,
            alone: None,
        };
        let checked = match &self.on {
            None => check_cpu(&subject),
            Some(on) => {
                let (_, session) = self.session(on, session)?;
                check_cuda(&subject, session, self.steps_max())
            }
        };
        checked.map_err(Ran::Check)
    }

    fn measure(&self, session: &mut Option<(Device, Session)>, checked: &Checked) -> Result<Measurement, Fault> {
        Ok(self.timer(session, checked)?.measure()?)
    }
}
