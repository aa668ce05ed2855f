//! Owns the trials of a wave kernel in the child process: each candidate is checked as a server checks the kernel, and timed in turns with the
//! incumbent as `bench --rows` and `bench --prompt` time it.
//!
//! All candidates share the weights, the cache and the pages of one batch kernel, which is loaded once and compared with the interpreter once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::abba::{self, Limits, Round};
use crate::candidate::{Candidate, WaveKnobs};
use crate::check::{
    CheckError, Checked, Figures, SharedTexts, check_ids, check_ragged, check_rows, check_shared, chooses_experts,
    takes_from_device,
};
use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::rows::RowLauncher;
use crate::cuda::waves::{StepsSession, WavesSession};
use crate::error::Fault;
use crate::interp::Pack;
use crate::manifest::SearchKernel;
use crate::measure::{self, timed_rows};
use crate::search::is_no_win;
use crate::search::judge::ROUNDS_MIN;
use crate::validate::Validated;

use super::chain::{Chain, Host};
use super::checks::{Checks, long_histories, sizes_of};
use super::device_rows::{Decoding, Reader, STEPS, load_launcher, time_launch, time_prompt};
use super::device_steps::{By, StepsKernel};
use super::device_waves::{PromptCubins, check_prompts, plan_prompts, waves_source};
use super::execute::{self, upload_pack};
use super::made::{Maker, Unmade, prompt_lengths};
use super::rows::Failure;
use super::stages::BuildContext;
use super::trial::{Answer, Job, ROUNDS_MAX, SAMPLES_ALONE, TIME_MAX_DEVICE};

/// Launches before the first that is timed.
const WARM_UP: usize = 2;

/// The child of a campaign over a wave kernel.
pub(super) struct WaveChild<'a> {
    maker: Maker<'a>,
    /// Of the candidate from whose schedule plans are derived.
    chain: Chain<'a>,
    opened: Option<Opened>,
}

/// What was loaded with the first job.
struct Opened {
    device: Device,
    pack: Pack,
    on_device: Arc<DeviceBuffer>,
    bench: Bench,
}

/// What all candidates share on the device, and those that are loaded.
pub struct Bench {
    base: Arc<Validated>,
    /// The kernel of `base`, and what it was compared.
    rows: Box<dyn RowLauncher>,
    judged: Checked,
    /// `None`: what is expected depends on what a kernel stores or chooses.
    texts: Option<SharedTexts>,
    /// Sequences that have decoded up to each position that is timed. A guard forgets what lies after the launch before, so each position has one of its
    /// own. All use the same pages: another launch may have overwritten what they hold, which changes no time.
    decodings: BTreeMap<u32, Decoding>,
    seats: Vec<Seat>,
}

/// A candidate that was loaded.
struct Seat {
    knobs: String,
    on: On,
    checked: Option<Figures>,
}

/// A wave kernel over the cache of the batch kernel.
pub enum On {
    Chunk(Box<WavesSession>),
    Steps(Box<dyn RowLauncher>),
}

/// Why a trial ended without times.
#[derive(Debug)]
pub enum Ended {
    Verdict(Box<Answer>),
    /// A fault that is not about the candidate.
    Fault(Fault),
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Ended {
        Ended::Fault(fault)
    }
}

/// A verdict about a candidate that computes something else, hangs or crashes.
fn failed(error: &CheckError, check_ms: Option<f64>) -> Ended {
    let (failure, detail, figures) = (Failure::of(error), error.to_string(), error.figures());
    Ended::Verdict(Box::new(Answer::Failed { failure, detail, figures, check_ms }))
}

/// A verdict about a candidate whose launch failed. The process ends, because its context may be lost.
fn crashed(fault: Fault) -> Ended {
    let (failure, detail) = (Failure::Crash, fault.message);
    Ended::Verdict(Box::new(Answer::Failed { failure, detail, figures: None, check_ms: None }))
}

impl<'a> WaveChild<'a> {
    pub(super) fn new(context: BuildContext<'a>, host: &'a Host<'a>) -> WaveChild<'a> {
        let chain = Chain::new(context, host, context.search_default());
        WaveChild { maker: Maker::new(context, host, true), chain, opened: None }
    }

    /// Checks and times the candidate of a job.
    ///
    /// # Errors
    /// A fault that is not about the candidate.
    pub(super) fn answer(&mut self, job: &Job) -> Result<Answer, Fault> {
        match self.trial(job) {
            Ok(answer) => Ok(answer),
            Err(Ended::Verdict(answer)) => Ok(*answer),
            Err(Ended::Fault(fault)) => Err(fault),
        }
    }

    fn trial(&mut self, job: &Job) -> Result<Answer, Ended> {
        let mut opened = match self.opened.take() {
            Some(opened) => opened,
            None => self.open()?,
        };
        let answer = self.trial_on(&mut opened, job);
        self.opened = Some(opened);
        answer
    }

    fn trial_on(&self, opened: &mut Opened, job: &Job) -> Result<Answer, Ended> {
        opened.bench.keep(job);
        for knobs in job.incumbent.iter().chain([&job.candidate]) {
            self.load(opened, knobs)?;
        }
        let Opened { device, pack, bench, .. } = opened;
        let own = pack.clone();
        let of_pack = move || Ok(own.clone());
        let checks = Checks::of(&self.chain, self.found()?, &of_pack)?;
        if let Some(incumbent) = &job.incumbent {
            bench.check(&checks, incumbent)?;
        }
        let started = Instant::now();
        let (figures, ran) = bench.check(&checks, &job.candidate)?;
        // A check of an earlier trial does not count as time of this one.
        let check_ms = if ran { started.elapsed().as_secs_f64() * 1e3 } else { 0.0 };
        let started = Instant::now();
        let (timed, rounds) = self.time(device, bench, job)?;
        let measure_ms = started.elapsed().as_secs_f64() * 1e3;
        Ok(Answer::Timed { figures, timed, rounds, check_ms, measure_ms })
    }

    fn found(&self) -> Result<&DeviceIdentity, Fault> {
        let none = || Fault::internal("a device that runs trials is gone");
        self.chain.host.device(self.chain.context.target)?.ok_or_else(none)
    }

    /// Loads weights and the batch kernel, and compares that.
    fn open(&self) -> Result<Opened, Fault> {
        let (chain, found) = (&self.chain, self.found()?);
        let device = execute::open(found, chain.context.target)?;
        let base = self.maker.base(&chain.candidate)?;
        let pack = chain.pack()?;
        let on_device = upload_pack(&device, &base, &pack)?;
        let (rows, knobs) = (base.schedule().program.rows, WaveKnobs::default());
        let kernel = StepsKernel { validated: Arc::clone(&base), rows, by: By::Words, knobs };
        let rows = load_launcher(chain, &device, &kernel, STEPS, Arc::clone(&on_device), None)?;
        let own = pack.clone();
        let of_pack = move || Ok(own.clone());
        let bench = Bench::new(&Checks::of(chain, found, &of_pack)?, base, rows)?;
        Ok(Opened { device, pack, on_device, bench })
    }

    /// Derives, compiles and loads a candidate, unless it is loaded.
    fn load(&self, opened: &mut Opened, knobs: &str) -> Result<(), Fault> {
        let Opened { device, on_device, bench, .. } = opened;
        if bench.has(knobs) {
            return Ok(());
        }
        let (chain, context) = (&self.chain, &self.chain.context);
        let candidate = Candidate::parse(knobs, &chain.candidate)
            .map_err(|error| Fault::input(format!("`{knobs}` is no candidate: {error}")))?;
        let (base, pack, cache) = (Arc::clone(&bench.base), Arc::clone(on_device), bench.rows.cache());
        let on = match context.searched() {
            SearchKernel::Chunk => {
                let plan = plan_prompts(context.target, &base, &candidate.waves)?;
                let cubins = chain.compile_named(plan.sources(context, Trace::Off))?;
                let of = |at: usize| cubins.get(at).map(|(_, cubin)| cubin.bytes.as_slice());
                let chunk = of(0).ok_or_else(|| Fault::internal("chunks without a cubin"))?;
                let cubins = PromptCubins { chunk, tail: of(1), knobs: candidate.waves };
                On::Chunk(Box::new(plan.load(device, cubins, Trace::Off, pack, cache)?))
            }
            _ => {
                let proven = self.maker.proven(&base, &candidate).map_err(|unmade| match unmade {
                    Unmade::Infeasible(reason) => Fault::internal(format!("a candidate was made before: {reason}")),
                    Unmade::Unproven(fault) | Unmade::Fault(fault) => fault,
                })?;
                let cubin = chain.compile(&waves_source(context, &proven, Trace::Off))?;
                let (off, cache) = (Trace::Off, Some(cache));
                On::Steps(Box::new(StepsSession::load(device, &proven, &cubin.bytes, off, STEPS, pack, cache)?))
            }
        };
        bench.sit(knobs, on);
        Ok(())
    }

    /// Times the candidate at every position or length, in turns with the incumbent where there is one.
    #[allow(clippy::type_complexity)] // As an answer has it.
    fn time(
        &self,
        device: &Device,
        bench: &mut Bench,
        job: &Job,
    ) -> Result<(Vec<measure::Timed>, Vec<(u32, Vec<[f64; 4]>)>), Ended> {
        let context = self.chain.context;
        let (positions, rows) = match context.searched() {
            SearchKernel::Wave { rows } => (context.manifest.decode.time_positions.clone(), rows),
            _ => (prompt_lengths(&context)?, 1),
        };
        let time_max = TIME_MAX_DEVICE / positions.len().max(1) as u32;
        let (steps, margin) = (if rows > 1 { STEPS } else { 1 }, context.manifest.search.margin);
        let validated = Arc::clone(&bench.base);
        let read = context.manifest.measured(context.target).read_bytes_per_s;
        let subject = measure::Subject {
            validated: &validated,
            graph: &context.imported.graph,
            target: context.target,
            // Which experts a step reads is not known before.
            read_bytes_per_s: read.filter(|_| !chooses_experts(&validated.schedule().program)),
            positions: &positions,
            steps_per_launch: steps,
        };
        let (mut all_timed, mut all_rounds) = (vec![], vec![]);
        for &position in &positions {
            let (samples, rounds) = bench.time(job, (position, rows), (time_max, margin))?;
            if let Some(rounds) = rounds {
                let abba = |round: &Round| [round.a[0], round.b[0], round.b[1], round.a[1]];
                all_rounds.push((position, rounds.iter().map(abba).collect()));
            }
            match timed_rows(&subject, rows, (position, steps), samples, device.clocks()) {
                Ok(timed) => all_timed.push(timed),
                Err(withheld) => {
                    let (failure, detail) = (Failure::Fail, withheld.reason);
                    let answer = Answer::Failed { failure, detail, figures: None, check_ms: None };
                    return Err(Ended::Verdict(Box::new(answer)));
                }
            }
        }
        Ok((all_timed, all_rounds))
    }
}

/// Why a comparison did not succeed.
enum Wrong {
    Check(CheckError),
    Fault(Fault),
}

impl From<CheckError> for Wrong {
    fn from(error: CheckError) -> Wrong {
        Wrong::Check(error)
    }
}

impl From<Fault> for Wrong {
    fn from(fault: Fault) -> Wrong {
        Wrong::Fault(fault)
    }
}

/// Compares a kernel for steps with what is expected of every one.
fn check_steps(
    checks: &Checks<'_>,
    base: &Validated,
    texts: Option<&SharedTexts>,
    session: &mut dyn RowLauncher,
) -> Result<Checked, CheckError> {
    match texts {
        Some(texts) => check_shared(texts, checks.precision, session, &mut checks.at_random()),
        None => check_rows(base, (checks.pack)().map_err(CheckError::Pack)?, checks.parameters, session),
    }
}

impl Bench {
    /// Candidates will be over the cache and the pages of `rows`, the kernel of `base`, which is compared with the interpreter.
    ///
    /// # Errors
    /// A kernel that computes something else; what the device refuses.
    pub fn new(checks: &Checks<'_>, base: Arc<Validated>, mut rows: Box<dyn RowLauncher>) -> Result<Bench, Fault> {
        let program = &checks.reference.schedule().program;
        let kernel = StepsKernel {
            validated: Arc::clone(&base),
            rows: rows.shape().rows,
            by: By::Words,
            knobs: WaveKnobs::default(),
        };
        let texts = match takes_from_device(program) {
            true => None,
            false => Some(checks.texts(sizes_of(checks.parameters, program.context_max, &[kernel]))?),
        };
        let judged = check_steps(checks, &base, texts.as_ref(), rows.as_mut())?;
        Ok(Bench { base, rows, judged, texts, decodings: BTreeMap::new(), seats: vec![] })
    }

    /// Whether a candidate is loaded.
    pub fn has(&self, knobs: &str) -> bool {
        self.seats.iter().any(|seat| seat.knobs == knobs)
    }

    /// Adds a candidate that was loaded.
    pub fn sit(&mut self, knobs: &str, on: On) {
        self.seats.push(Seat { knobs: knobs.to_string(), on, checked: None });
    }

    /// Drops the candidates that a job does not name.
    pub fn keep(&mut self, job: &Job) {
        let wanted = |knobs: &str| knobs == job.candidate || job.incumbent.as_deref() == Some(knobs);
        self.seats.retain(|seat| wanted(&seat.knobs));
    }

    /// Compares a loaded candidate, once. Also whether it was compared now.
    ///
    /// # Errors
    /// A verdict about a candidate that computes something else, or whose launch failed: it is no longer loaded.
    pub fn check(&mut self, checks: &Checks<'_>, knobs: &str) -> Result<(Figures, bool), Ended> {
        let gone = || Fault::internal("a candidate was loaded and is gone");
        let at = self.seats.iter().position(|seat| seat.knobs == knobs).ok_or_else(gone)?;
        if let Some(figures) = self.seats[at].checked {
            return Ok((figures, false));
        }
        let started = Instant::now();
        let checked = self.compare(checks, at);
        let check_ms = Some(started.elapsed().as_secs_f64() * 1e3);
        match checked {
            Ok(checked) => {
                let figures = checked.figures();
                self.seats[at].checked = Some(figures);
                Ok((figures, true))
            }
            Err(error) => {
                // A wrong kernel is not needed again.
                self.seats.remove(at);
                Err(match error {
                    Wrong::Check(error) => failed(&error, check_ms),
                    Wrong::Fault(fault) => crashed(fault),
                })
            }
        }
    }

    /// Compares the candidate of a seat: steps with the interpreter, and over long histories with the batch kernel; chunks with the batch kernel.
    fn compare(&mut self, checks: &Checks<'_>, at: usize) -> Result<Checked, Wrong> {
        let Bench { base, rows, judged, texts, seats, .. } = self;
        match &mut seats[at].on {
            On::Chunk(waves) => {
                Ok(check_prompts(base, checks.pack, checks.parameters, judged, rows.as_mut(), waves.as_mut())?)
            }
            On::Steps(session) => {
                let checked = check_steps(checks, base, texts.as_ref(), session.as_mut())?;
                // Of a mixture, two right kernels may choose different experts: `check_rows` has a long history.
                if !chooses_experts(&base.schedule().program) {
                    let both = long_histories(rows.as_mut(), session.as_mut())?;
                    check_ragged(checks.precision, judged, &both)?;
                }
                Ok(checked)
            }
        }
    }

    /// Times the candidate of a job, in turns with the incumbent where there is one: steps of `rows` rows from `position` on, or a prompt of so many
    /// tokens. Samples of the candidate in microseconds, and the rounds.
    ///
    /// # Errors
    /// A verdict about a candidate whose launch failed.
    #[allow(clippy::type_complexity)] // Samples, and rounds if there are some.
    pub fn time(
        &mut self,
        job: &Job,
        (position, rows): (u32, u32),
        (time_max, margin): (Duration, f64),
    ) -> Result<(Vec<f64>, Option<Vec<Round>>), Ended> {
        let gone = || Fault::internal("a candidate was loaded and is gone");
        let Bench { rows: batch, decodings, seats, .. } = self;
        // The candidate last: B.
        seats.sort_by_key(|seat| seat.knobs == job.candidate);
        let (b, a) = seats.split_last_mut().ok_or_else(gone)?;
        let a = a.first_mut().map(|seat| &mut seat.on);
        if let On::Steps(session) = &mut b.on
            && !decodings.contains_key(&position)
        {
            let mut decoding = Decoding::at(session.as_mut(), rows, position, STEPS).map_err(crashed)?;
            // Each launch begins with these, on whichever kernel it runs.
            decoding.give_tokens(|row| row + 1);
            decodings.insert(position, decoding);
        }
        let ids = check_ids(batch.vocab(), position.max(1));
        let mut pair =
            Pair { a, b: &mut b.on, batch: batch.as_mut(), decoding: decodings.get_mut(&position), position, ids };
        pair.time(time_max, margin).map_err(crashed)
    }
}

/// Two kernels that take turns.
struct Pair<'b> {
    a: Option<&'b mut On>,
    b: &'b mut On,
    batch: &'b mut dyn RowLauncher,
    decoding: Option<&'b mut Decoding>,
    position: u32,
    ids: Vec<u32>,
}

impl Pair<'_> {
    /// Samples of the candidate, and the rounds with the incumbent if there is one.
    fn time(&mut self, time_max: Duration, margin: f64) -> Result<(Vec<f64>, Option<Vec<Round>>), Fault> {
        for _ in 0..WARM_UP {
            self.launch_b()?;
        }
        if self.a.is_none() {
            return Ok(((0..SAMPLES_ALONE).map(|_| self.launch_b()).collect::<Result<_, _>>()?, None));
        }
        self.launch_a()?;
        let mut turns = |rounds_min, rounds_max| {
            let limits = Limits { rounds_min, rounds_max, time_max };
            abba::rounds(limits, self, Pair::launch_a, Pair::launch_b)
        };
        let mut rounds = turns(ROUNDS_MIN, ROUNDS_MIN)?;
        if !is_no_win(&rounds, margin) {
            rounds.extend(turns(0, ROUNDS_MAX - ROUNDS_MIN)?);
        }
        Ok((rounds.iter().flat_map(|round| round.b).collect(), Some(rounds)))
    }

    fn launch_a(&mut self) -> Result<f64, Fault> {
        let Pair { a, batch, decoding, position, ids, .. } = self;
        let a = a.as_mut().ok_or_else(|| Fault::internal("an incumbent was loaded and is gone"))?;
        launch(a, *batch, decoding.as_deref_mut(), *position, ids)
    }

    fn launch_b(&mut self) -> Result<f64, Fault> {
        let Pair { b, batch, decoding, position, ids, .. } = self;
        launch(b, *batch, decoding.as_deref_mut(), *position, ids)
    }
}

/// Microseconds of a step, or of a prompt.
fn launch(
    on: &mut On,
    batch: &mut dyn RowLauncher,
    decoding: Option<&mut Decoding>,
    position: u32,
    ids: &[u32],
) -> Result<f64, Fault> {
    match (on, decoding) {
        (On::Chunk(waves), _) => {
            let mut reader = Reader { rows: batch, waves: Some(waves.as_mut()) };
            Ok(time_prompt(&mut reader, ids)? * 1e3)
        }
        (On::Steps(session), Some(decoding)) => time_launch(session.as_mut(), decoding, position),
        (On::Steps(_), None) => Err(Fault::internal("steps without sequences")),
    }
}
