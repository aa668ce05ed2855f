//! Owns the child process of a campaign: it checks a candidate and times it in turns with the incumbent, one job a line.
//!
//! A process of its own, because a process does not survive what a wrong kernel does to its context. It lives as long as it answers:
//! the incumbent stays loaded from one trial to the next, and weights whose order two candidates share are on the device
//! once. The parent kills a child that is late, and starts another one.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::abba::{self, Limits, Round};
use crate::candidate::Candidate;
use crate::check::{self, CheckError, Checked, Expected, Figures, check_cuda, compare_cpu, compare_cuda};
use crate::check::{compare_cpu_codes, expect_cpu, expect_cuda};
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::session::Session;
use crate::error::Fault;
use crate::interp::{Interp, Options, Pack};
use crate::lower::{LayerOp, outputs};
use crate::manifest::{Manifest, SearchKernel};
use crate::measure::{self, MeasureError, Timed, Timer};
use crate::search::judge::ROUNDS_MIN;
use crate::search::{Rounds, is_no_win};
use crate::target::Target;

use super::chain::{Chain, Host};
use super::execute;
use super::keys::{self, ExpectKey};
use super::resident::Resident;
use super::rows::Failure;
use super::stages::{BuildContext, Model, memory_pack};
use super::wave_trial::WaveChild;
use super::{Workspace, import_stage};

/// Rounds at one position: more would narrow the interval by less than they cost.
pub(super) const ROUNDS_MAX: usize = 11;
/// Time for the rounds of all positions together, past the fewest.
const TIME_MAX_CPU: Duration = Duration::from_millis(3000);
pub(super) const TIME_MAX_DEVICE: Duration = Duration::from_millis(1200);
/// Launches of the first candidate, which has nothing to take turns with.
pub(super) const SAMPLES_ALONE: usize = 2 * ROUNDS_MAX;

/// What the child is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The campaign that asks; a child of another one would time something else.
    pub campaign: String,
    /// Knobs of the candidate.
    pub candidate: String,
    /// Knobs of what it takes turns with; `None` for the first.
    pub incumbent: Option<String>,
}

/// What it answers, one JSON line a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "lowercase")]
pub enum Answer {
    /// Checked, and timed at every position.
    Timed {
        figures: Figures,
        timed: Vec<Timed>,
        /// By position, in the order A B B A, µs per step.
        rounds: Vec<(u32, Vec<[f64; 4]>)>,
        check_ms: f64,
        measure_ms: f64,
    },
    /// A verdict about the candidate.
    Failed {
        #[serde(rename = "verdict")]
        failure: Failure,
        detail: String,
        figures: Option<Figures>,
        check_ms: Option<f64>,
    },
    /// A fault that is not about the candidate: the campaign cannot continue.
    Fault(Fault),
}

impl Answer {
    /// The rounds as the judge reads them.
    pub fn rounds(rounds: &[(u32, Vec<[f64; 4]>)]) -> Vec<Rounds> {
        let round = |&[a1, b1, b2, a2]: &[f64; 4]| Round { a: [a1, a2], b: [b1, b2] };
        rounds
            .iter()
            .map(|(position, rounds)| Rounds { position: *position, rounds: rounds.iter().map(round).collect() })
            .collect()
    }
}

/// What a child does with a job.
type Answers<'a> = dyn FnMut(&Job) -> Result<Answer, Fault> + 'a;

/// Answers jobs, a line each, until there are no more; of the whole model, or of one op alone.
///
/// # Errors
/// Faults of the import, before the first job; an output without a reader.
pub fn serve(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    op: Option<LayerOp>,
    jobs: impl Iterator<Item = io::Result<String>>,
    mut output: impl Write,
) -> Result<(), Fault> {
    let model: Model = import_stage(workspace, manifest)?;
    let model = match op {
        None => model,
        Some(op) => model.alone(op, target),
    };
    let context = BuildContext::new(workspace, manifest, target, &model)?;
    let host = Host::new(workspace);
    let campaign = context.campaign(&host.hardware(target)?)?.to_string();
    let positions = checked_positions(manifest);
    let mut answer: Box<Answers<'_>> = match context.searched() {
        SearchKernel::Decode => {
            let mut child = Child::new(context, &host, &positions)?;
            Box::new(move |job| child.answer(job))
        }
        SearchKernel::Wave { .. } | SearchKernel::Chunk => {
            let mut child = WaveChild::new(context, &host);
            Box::new(move |job| child.answer(job))
        }
    };
    for line in jobs {
        let line = line.map_err(|error| Fault::environment(format!("cannot read a job: {error}")))?;
        let job: Job = serde_json::from_str(&line).map_err(|error| {
            Fault::input(format!("`{line}` is no job: {error}"))
                .with_remedy("this command is started by `monobloc tune`")
        })?;
        if job.campaign != campaign {
            let message = "the manifest or the program changed while the campaign ran";
            return Err(Fault::input(message).with_remedy("start the same command again"));
        }
        let answer = answer(&job).unwrap_or_else(Answer::Fault);
        let text = serde_json::to_string(&answer)
            .map_err(|error| Fault::internal(format!("an answer cannot be written: {error}")))?;
        writeln!(output, "{text}")
            .and_then(|()| output.flush())
            .map_err(|error| Fault::environment(format!("cannot write an answer: {error}")))?;
    }
    Ok(())
}

/// The manifest's own positions, and the deepest that is timed: a candidate decides where attention begins to be split, and only
/// regimes that were checked may be timed.
fn checked_positions(manifest: &Manifest) -> Vec<u32> {
    let decode = &manifest.decode;
    let mut positions: Vec<u32> = decode.check_positions.iter().chain(decode.time_positions.last()).copied().collect();
    positions.sort_unstable();
    positions.dedup();
    positions
}

/// A candidate that was loaded and checked.
struct Seat<'a> {
    knobs: String,
    chain: Chain<'a>,
    on: On,
    checked: Option<Checked>,
    /// Rows of its cache that were made up.
    filled: Option<u32>,
}

pub(super) enum On {
    Cpu(Pack),
    Device(Box<Session>),
}

struct Child<'a> {
    context: BuildContext<'a>,
    host: &'a Host<'a>,
    /// Where a candidate is checked.
    positions: &'a [u32],
    found: Option<&'a DeviceIdentity>,
    device: Option<Device>,
    expected: Option<Expected>,
    /// The weights of every seat.
    weights: Resident,
    /// The weights of the interpreter, if a device's cache has codes.
    host_weights: Resident,
    seats: Vec<Seat<'a>>,
}

/// Why a trial ended without times.
enum Ended {
    Verdict(Box<Answer>),
    Fault(Fault),
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Ended {
        Ended::Fault(fault)
    }
}

fn failed(error: &CheckError, check_ms: Option<f64>) -> Answer {
    Answer::Failed { failure: Failure::of(error), detail: error.to_string(), figures: error.figures(), check_ms }
}

impl<'a> Child<'a> {
    fn new(context: BuildContext<'a>, host: &'a Host<'a>, positions: &'a [u32]) -> Result<Child<'a>, Fault> {
        Ok(Child {
            context,
            host,
            positions,
            found: host.device(context.target)?,
            device: None,
            expected: None,
            weights: Resident::default(),
            host_weights: Resident::default(),
            seats: vec![],
        })
    }

    fn answer(&mut self, job: &Job) -> Result<Answer, Fault> {
        match self.trial(job) {
            Ok(answer) => Ok(answer),
            Err(Ended::Verdict(answer)) => Ok(*answer),
            Err(Ended::Fault(fault)) => Err(fault),
        }
    }

    fn trial(&mut self, job: &Job) -> Result<Answer, Ended> {
        let wanted = |knobs: &str| knobs == job.candidate || job.incumbent.as_deref() == Some(knobs);
        self.seats.retain(|seat| wanted(&seat.knobs));
        if let Some(incumbent) = &job.incumbent {
            self.load(incumbent)?;
            self.check(incumbent)?;
        }
        self.load(&job.candidate)?;
        let started = Instant::now();
        let (figures, ran) = self.check(&job.candidate)?;
        // A check of an earlier trial does not count as time of this one.
        let check_ms = if ran { started.elapsed().as_secs_f64() * 1e3 } else { 0.0 };
        let started = Instant::now();
        let (timed, rounds) = self.time(job)?;
        let measure_ms = started.elapsed().as_secs_f64() * 1e3;
        Ok(Answer::Timed { figures, timed, rounds, check_ms, measure_ms })
    }

    fn seat(&mut self, knobs: &str) -> Option<&mut Seat<'a>> {
        self.seats.iter_mut().find(|seat| seat.knobs == knobs)
    }

    /// Places, compiles, packs and loads a candidate, unless it is loaded.
    fn load(&mut self, knobs: &str) -> Result<(), Fault> {
        if self.seat(knobs).is_some() {
            return Ok(());
        }
        let candidate = Candidate::parse(knobs, &self.context.default_candidate())
            .map_err(|error| Fault::input(format!("`{knobs}` is no candidate: {error}")))?;
        let chain = Chain::new(self.context, self.host, candidate);
        chain.make_kernel()?;
        let on = match self.found {
            None => On::Cpu(self.weights.pack(&chain)?),
            Some(found) => {
                let device = match &mut self.device {
                    Some(device) => device,
                    empty => empty.insert(execute::open(found, self.context.target)?),
                };
                On::Device(Box::new(self.weights.session(&chain, device)?))
            }
        };
        self.seats.push(Seat { knobs: knobs.to_string(), chain, on, checked: None, filled: None });
        Ok(())
    }

    /// Compares a loaded candidate with what is expected of the model, once. Also whether it was compared now.
    fn check(&mut self, knobs: &str) -> Result<(Figures, bool), Ended> {
        let gone = || Fault::internal("a candidate was loaded and is gone");
        let seat = self.seat(knobs).ok_or_else(gone)?;
        if let Some(checked) = &seat.checked {
            return Ok((checked.figures(), false));
        }
        // The reference takes codes and choices of each candidate, so no expectation holds for all of them.
        let by_device = check::takes_from_device(&seat.chain.validated().map_err(Fault::from)?.schedule().program);
        if self.expected.is_none() && !by_device {
            self.expected = Some(self.expect()?);
        }
        let steps_max = self.context.manifest.decode.steps_per_launch;
        let seat = self.seats.iter_mut().find(|seat| seat.knobs == knobs).ok_or_else(gone)?;
        let started = Instant::now();
        let empty: Pack = std::sync::Arc::new([0u8; 0]);
        let pack = match &seat.on {
            On::Cpu(pack) => pack.clone(),
            // The interpreter takes the codes of this very candidate.
            On::Device(_) if check::stores_codes(self.context.manifest.precision) => {
                self.host_weights.pack(&seat.chain)?
            }
            // A comparison with what is expected reads no weights on the host.
            On::Device(_) => empty,
        };
        let subject = check_subject(&seat.chain, pack, self.positions)?;
        let checked = match (&mut seat.on, &self.expected) {
            (On::Cpu(pack), expected) => Interp::new(subject.validated.schedule(), pack.clone(), Options::fast())
                .map_err(CheckError::from)
                .and_then(|mut fast| match expected {
                    Some(expected) => compare_cpu(&subject, expected, &mut fast),
                    None => compare_cpu_codes(&subject, &mut fast, &|| {}),
                }),
            (On::Device(session), Some(expected)) => compare_cuda(&subject, expected, session, steps_max),
            (On::Device(session), None) => check_cuda(&subject, session, steps_max, &|| {}),
        };
        match checked {
            Ok(checked) => {
                let figures = checked.figures();
                seat.checked = Some(checked);
                Ok((figures, true))
            }
            Err(error) => {
                let answer = failed(&error, Some(started.elapsed().as_secs_f64() * 1e3));
                // A kernel that hung or crashed has destroyed its context, and a wrong one is not needed again.
                self.seats.retain(|seat| seat.knobs != knobs);
                Err(Ended::Verdict(Box::new(answer)))
            }
        }
    }

    /// The reference for all candidates, made from the default candidate through the cache.
    fn expect(&self) -> Result<Expected, Ended> {
        let context = self.context;
        let weights = context.weights_id()?;
        let chain = Chain::new(context, self.host, context.default_candidate());
        let schedule = chain.schedule().map_err(Fault::from)?.content;
        let positions = self.positions;
        // The reference knows only whole models; an op alone is compared with the interpreter, as a device is.
        let device = self.found.is_some() || context.op.is_some();
        let (code, graph) = (keys::code(keys::EXPECT), context.graph);
        let keyed = ExpectKey { code, schedule, graph, weights: &weights, positions, device }.keyed();
        let make = || -> Result<Vec<u8>, Fault> {
            let pack = memory_pack(&context, chain.validated()?)?;
            let subject = check_subject(&chain, pack, positions)?;
            // A child has no terminal to show progress on.
            let expected = if device { expect_cuda(&subject, &|| {}) } else { expect_cpu(&subject, &|| {}) };
            Ok(expected?.to_entry())
        };
        let (entry, _) = context.workspace.stage(&keyed, &context.subject(), &context.title(keyed.stage), "", make)?;
        let bytes = entry.bytes().map_err(Fault::from)?;
        let unreadable = || Fault::internal(format!("the stored result `{}` cannot be read", entry.path().display()));
        Ok(Expected::from_entry(&bytes).ok_or_else(unreadable)?)
    }

    /// Times the candidate at every position, in turns with the incumbent where there is one.
    #[allow(clippy::type_complexity)] // As an answer has it.
    fn time(&mut self, job: &Job) -> Result<(Vec<Timed>, Vec<(u32, Vec<[f64; 4]>)>), Ended> {
        let Child { context, device, seats, .. } = self;
        let lost = || Fault::internal("a candidate was loaded and is gone");
        let decode = &context.manifest.decode;
        let share = |all: Duration| all / decode.time_positions.len().max(1) as u32;
        let time_max = share(if device.is_some() { TIME_MAX_DEVICE } else { TIME_MAX_CPU });
        let (mut all_timed, mut all_rounds) = (vec![], vec![]);
        let mut pair: Vec<&mut Seat<'_>> = seats.iter_mut().collect();
        // The candidate last: B.
        pair.sort_by_key(|seat| seat.knobs == job.candidate);
        let (b, a) = pair.split_last_mut().ok_or_else(lost)?;
        let mut b_timer = timer(device.as_ref(), b)?;
        let mut a_timer = match a.first_mut() {
            Some(a) => Some(timer(device.as_ref(), a)?),
            None => None,
        };
        // The deepest first: its cache serves the others.
        for &position in decode.time_positions.iter().rev() {
            let measured = |error: MeasureError| match error {
                MeasureError::Session(error) => Ended::Verdict(Box::new(failed(&CheckError::Session(error), None))),
                MeasureError::Interp(error) => Ended::Fault(error.into()),
            };
            b_timer.prepare(position).map_err(measured)?;
            let mut samples = vec![];
            match &mut a_timer {
                None => {
                    for _ in 0..SAMPLES_ALONE {
                        samples.push(b_timer.launch().map_err(measured)?);
                    }
                }
                Some(a_timer) => {
                    a_timer.prepare(position).map_err(measured)?;
                    let mut both = (a_timer, &mut b_timer);
                    let mut turns = |rounds_min, rounds_max| {
                        let limits = Limits { rounds_min, rounds_max, time_max };
                        abba::rounds(limits, &mut both, |both| both.0.launch(), |both| both.1.launch())
                    };
                    let mut rounds = turns(ROUNDS_MIN, ROUNDS_MIN).map_err(measured)?;
                    if !is_no_win(&rounds, context.manifest.search.margin) {
                        rounds.extend(turns(0, ROUNDS_MAX - ROUNDS_MIN).map_err(measured)?);
                    }
                    samples.extend(rounds.iter().flat_map(|round| round.b));
                    let abba = |round: &Round| [round.a[0], round.b[0], round.b[1], round.a[1]];
                    all_rounds.push((position, rounds.iter().map(abba).collect()));
                }
            }
            match b_timer.timed(samples) {
                Ok(timed) => all_timed.push(timed),
                Err(withheld) => {
                    let (failure, detail) = (Failure::Fail, withheld.reason);
                    let answer = Answer::Failed { failure, detail, figures: None, check_ms: None };
                    return Err(Ended::Verdict(Box::new(answer)));
                }
            }
        }
        let filled = (a_timer.as_ref().and_then(Timer::filled), b_timer.filled());
        drop((a_timer, b_timer));
        if let Some(a) = a.first_mut() {
            a.filled = filled.0;
        }
        b.filled = filled.1;
        all_timed.reverse();
        all_rounds.reverse();
        Ok((all_timed, all_rounds))
    }
}

fn timer<'s>(device: Option<&'s Device>, seat: &'s mut Seat<'_>) -> Result<Timer<'s>, Ended> {
    let Seat { chain, on, checked, filled, .. } = seat;
    let checked =
        checked.as_ref().ok_or_else(|| Fault::internal("a candidate that was not checked cannot be timed"))?;
    let context = &chain.context;
    let decode = &context.manifest.decode;
    let subject = measure::Subject {
        validated: chain.validated().map_err(Fault::from)?,
        graph: &context.imported.graph,
        target: context.target,
        read_bytes_per_s: context.manifest.measured(context.target).read_bytes_per_s,
        positions: &decode.time_positions,
        steps_per_launch: decode.steps_per_launch,
    };
    match (on, device) {
        (On::Cpu(pack), _) => Ok(Timer::cpu(subject, checked, pack.clone()).map_err(Fault::from)?),
        (On::Device(session), Some(device)) => Ok(Timer::cuda(subject, checked, device, session).with_filled(*filled)),
        (On::Device(_), None) => Err(Fault::internal("a session without a device").into()),
    }
}

fn check_subject<'s>(chain: &'s Chain<'_>, pack: Pack, positions: &'s [u32]) -> Result<check::Subject<'s>, Fault> {
    let (context, validated) = (&chain.context, chain.validated()?);
    Ok(check::Subject {
        validated,
        target: context.target,
        graph: &context.imported.graph,
        weights: &context.imported.weights,
        pack,
        positions,
        alone: context.op.map(|op| outputs(op, &validated.schedule().program)),
    })
}
