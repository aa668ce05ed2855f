//! Owns the trials of a wave kernel in the child process: each candidate is checked as a server checks the kernel, and timed in turns with the
//! incumbent as `bench --rows` and `bench --prompt` time it.
//!
//! All candidates share the weights, the cache and the pages of one batch kernel, which is loaded once and compared with the interpreter once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::abba::{self, Limits, Round};
use crate::candidate::Candidate;
use crate::check::{
    CheckError, Checked, Figures, SharedTexts, check_ids, check_ragged, check_rows, check_shared, chooses_experts,
    takes_from_device,
};
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
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
use super::execute::upload_pack;
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
    bench: Option<Bench>,
}

/// What all candidates share on the device.
struct Bench {
    device: Device,
    base: Arc<Validated>,
    pack: Pack,
    on_device: Arc<DeviceBuffer>,
    /// The kernel of `base`, and what it was compared.
    rows: Box<dyn RowLauncher>,
    judged: Checked,
    /// `None`: what is expected depends on what a kernel stores or chooses.
    texts: Option<SharedTexts>,
    /// Sequences as long as the deepest position that is timed.
    decoding: Option<Decoding>,
    seats: Vec<Seat>,
}

/// A candidate that was loaded.
struct Seat {
    knobs: String,
    on: On,
    checked: Option<Figures>,
}

enum On {
    Chunk(WavesSession),
    Steps(Box<dyn RowLauncher>),
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
    pub fn new(context: BuildContext<'a>, host: &'a Host<'a>) -> WaveChild<'a> {
        let chain = Chain::new(context, host, context.search_default());
        WaveChild { maker: Maker::new(context, host, true), chain, bench: None }
    }

    /// Checks and times the candidate of a job.
    ///
    /// # Errors
    /// A fault that is not about the candidate.
    pub fn answer(&mut self, job: &Job) -> Result<Answer, Fault> {
        match self.trial(job) {
            Ok(answer) => Ok(answer),
            Err(Ended::Verdict(answer)) => Ok(*answer),
            Err(Ended::Fault(fault)) => Err(fault),
        }
    }

    fn trial(&mut self, job: &Job) -> Result<Answer, Ended> {
        if self.bench.is_none() {
            self.bench = Some(self.open()?);
        }
        let wanted = |knobs: &str| knobs == job.candidate || job.incumbent.as_deref() == Some(knobs);
        self.bench()?.seats.retain(|seat| wanted(&seat.knobs));
        for knobs in job.incumbent.iter().chain([&job.candidate]) {
            self.load(knobs)?;
        }
        let started = Instant::now();
        if let Some(incumbent) = &job.incumbent {
            self.check(incumbent)?;
        }
        let (figures, ran) = self.check(&job.candidate)?;
        // A check of an earlier trial does not count as time of this one.
        let check_ms = if ran { started.elapsed().as_secs_f64() * 1e3 } else { 0.0 };
        let started = Instant::now();
        let (timed, rounds) = self.time(job)?;
        let measure_ms = started.elapsed().as_secs_f64() * 1e3;
        Ok(Answer::Timed { figures, timed, rounds, check_ms, measure_ms })
    }

    fn bench(&mut self) -> Result<&mut Bench, Fault> {
        self.bench.as_mut().ok_or_else(|| Fault::internal("kernels were loaded and are gone"))
    }

    /// Loads weights and the batch kernel, and compares that.
    fn open(&self) -> Result<Bench, Fault> {
        let (chain, context) = (&self.chain, &self.chain.context);
        let none = || Fault::internal("a device that runs trials is gone");
        let found = chain.host.device(context.target)?.ok_or_else(none)?;
        let device = Device::open(found.ordinal)?;
        let base = self.maker.base(&chain.candidate)?;
        let pack = chain.pack()?;
        let on_device = upload_pack(&device, &base, &pack)?;
        let (rows, knobs) = (base.schedule().program.rows, chain.candidate.waves);
        let kernel = StepsKernel { validated: Arc::clone(&base), rows, by: By::Words, knobs };
        let mut rows = load_launcher(chain, &device, &kernel, STEPS, Arc::clone(&on_device), None)?;
        let own = pack.clone();
        let of_pack = move || Ok(own.clone());
        let checks = Checks::of(chain, found, &of_pack)?;
        let texts = match takes_from_device(&base.schedule().program) {
            true => None,
            false => {
                let context_max = checks.reference.schedule().program.context_max;
                Some(checks.texts(sizes_of(checks.parameters, context_max, &[kernel]))?)
            }
        };
        let judged = check_steps(&checks, &base, &pack, texts.as_ref(), rows.as_mut())?;
        Ok(Bench { device, base, pack, on_device, rows, judged, texts, decoding: None, seats: vec![] })
    }

    /// Derives, compiles and loads a candidate, unless it is loaded.
    fn load(&mut self, knobs: &str) -> Result<(), Fault> {
        let WaveChild { maker, chain, bench: Some(bench) } = self else {
            return Err(Fault::internal("kernels were loaded and are gone"));
        };
        if bench.seats.iter().any(|seat| seat.knobs == knobs) {
            return Ok(());
        }
        let context = &chain.context;
        let candidate = Candidate::parse(knobs, &chain.candidate)
            .map_err(|error| Fault::input(format!("`{knobs}` is no candidate: {error}")))?;
        let (device, base) = (&bench.device, &bench.base);
        let (pack, cache) = (Arc::clone(&bench.on_device), bench.rows.cache());
        let on = match context.searched() {
            SearchKernel::Chunk => {
                let plan = plan_prompts(context.target, base, &candidate.waves)?;
                let cubins = chain.compile_named(plan.sources(context, Trace::Off))?;
                let of = |at: usize| cubins.get(at).map(|(_, cubin)| cubin.bytes.as_slice());
                let chunk = of(0).ok_or_else(|| Fault::internal("chunks without a cubin"))?;
                let cubins = PromptCubins { chunk, tail: of(1), knobs: candidate.waves };
                On::Chunk(plan.load(device, cubins, Trace::Off, pack, cache)?)
            }
            _ => {
                let proven = maker.proven(base, &candidate).map_err(|unmade| match unmade {
                    Unmade::Infeasible(reason) => Fault::internal(format!("a candidate was made before: {reason}")),
                    Unmade::Unproven(fault) | Unmade::Fault(fault) => fault,
                })?;
                let cubin = chain.compile(&waves_source(context, &proven, Trace::Off))?;
                let cache = Some(cache);
                On::Steps(Box::new(StepsSession::load(device, &proven, &cubin.bytes, Trace::Off, STEPS, pack, cache)?))
            }
        };
        bench.seats.push(Seat { knobs: knobs.to_string(), on, checked: None });
        Ok(())
    }

    /// Compares a loaded candidate, once. Also whether it was compared now.
    fn check(&mut self, knobs: &str) -> Result<(Figures, bool), Ended> {
        let gone = || Fault::internal("a candidate was loaded and is gone");
        let WaveChild { chain, bench: Some(bench), .. } = self else { return Err(gone().into()) };
        let at = bench.seats.iter().position(|seat| seat.knobs == knobs).ok_or_else(gone)?;
        if let Some(figures) = bench.seats[at].checked {
            return Ok((figures, false));
        }
        let started = Instant::now();
        let checked = bench.compare(chain, at);
        let check_ms = Some(started.elapsed().as_secs_f64() * 1e3);
        match checked {
            Ok(checked) => {
                let figures = checked.figures();
                bench.seats[at].checked = Some(figures);
                Ok((figures, true))
            }
            Err(error) => {
                // A wrong kernel is not needed again.
                bench.seats.remove(at);
                Err(match error {
                    Wrong::Check(error) => failed(&error, check_ms),
                    Wrong::Fault(fault) => crashed(fault),
                })
            }
        }
    }

    /// Times the candidate at every position or length, in turns with the incumbent where there is one.
    #[allow(clippy::type_complexity)] // As an answer has it.
    fn time(&mut self, job: &Job) -> Result<(Vec<measure::Timed>, Vec<(u32, Vec<[f64; 4]>)>), Ended> {
        let gone = || Fault::internal("a candidate was loaded and is gone");
        let WaveChild { chain, bench: Some(bench), .. } = self else { return Err(gone().into()) };
        let context = chain.context;
        let (positions, rows) = match context.searched() {
            SearchKernel::Wave { rows } => (context.manifest.decode.time_positions.clone(), rows),
            _ => (prompt_lengths(&context)?, 1),
        };
        let time_max = TIME_MAX_DEVICE / positions.len().max(1) as u32;
        let steps = if rows > 1 { STEPS } else { 1 };
        let subject = measure::Subject {
            validated: &bench.base.clone(),
            graph: &context.imported.graph,
            target: context.target,
            // Which experts a step reads is not known before.
            read_bytes_per_s: context
                .manifest
                .measured(context.target)
                .read_bytes_per_s
                .filter(|_| !chooses_experts(&bench.base.schedule().program)),
            positions: &positions,
            steps_per_launch: steps,
        };
        let margin = context.manifest.search.margin;
        let (mut all_timed, mut all_rounds) = (vec![], vec![]);
        for &position in &positions {
            let mut pair =
                bench.pair(job, (position, rows), positions.last().copied().unwrap_or(0), subject.graph.vocab)?;
            let (samples, rounds) = pair.time(time_max, margin).map_err(crashed)?;
            if let Some(rounds) = rounds {
                let abba = |round: &Round| [round.a[0], round.b[0], round.b[1], round.a[1]];
                all_rounds.push((position, rounds.iter().map(abba).collect()));
            }
            match timed_rows(&subject, rows, (position, steps), samples, bench.device.clocks()) {
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
    pack: &Pack,
    texts: Option<&SharedTexts>,
    session: &mut dyn RowLauncher,
) -> Result<Checked, CheckError> {
    match texts {
        Some(texts) => check_shared(texts, checks.precision, session, &mut checks.at_random()),
        None => check_rows(base, pack.clone(), checks.parameters, session),
    }
}

impl Bench {
    /// Compares the candidate of a seat: steps with the interpreter, and over long histories with the batch kernel; chunks with the batch kernel.
    fn compare(&mut self, chain: &Chain<'_>, at: usize) -> Result<Checked, Wrong> {
        let Bench { base, pack, rows, judged, texts, seats, .. } = self;
        let none = || Fault::internal("a device that runs trials is gone");
        let found = chain.host.device(chain.context.target).map_err(Fault::from)?.ok_or_else(none)?;
        let own = pack.clone();
        let of_pack = move || Ok(own.clone());
        let checks = Checks::of(chain, found, &of_pack)?;
        match &mut seats[at].on {
            On::Chunk(waves) => Ok(check_prompts(base, &of_pack, checks.parameters, judged, rows.as_mut(), waves)?),
            On::Steps(session) => {
                let checked = check_steps(&checks, base, pack, texts.as_ref(), session.as_mut())?;
                // Of a mixture, two right kernels may choose different experts: `check_rows` has a long history.
                if !chooses_experts(&base.schedule().program) {
                    let both = long_histories(rows.as_mut(), session.as_mut())?;
                    check_ragged(checks.precision, judged, &both)?;
                }
                Ok(checked)
            }
        }
    }

    /// The candidate of a job and its incumbent, ready to be launched at a position, or to read a prompt of so many tokens. `deepest`: the last position
    /// of all.
    fn pair(&mut self, job: &Job, (position, rows): (u32, u32), deepest: u32, vocab: u32) -> Result<Pair<'_>, Ended> {
        let gone = || Fault::internal("a candidate was loaded and is gone");
        let Bench { rows: batch, decoding, seats, .. } = self;
        // The candidate last: B.
        seats.sort_by_key(|seat| seat.knobs == job.candidate);
        let (b, a) = seats.split_last_mut().ok_or_else(gone)?;
        let a = a.first_mut().map(|seat| &mut seat.on);
        if let On::Steps(session) = &mut b.on
            && decoding.is_none()
        {
            *decoding = Some(Decoding::at(session.as_mut(), rows, deepest, STEPS).map_err(crashed)?);
        }
        if let Some(decoding) = decoding {
            // Each launch begins with these, on whichever kernel it runs.
            decoding.give_tokens(|row| row + 1);
        }
        let ids = check_ids(vocab, position.max(1));
        Ok(Pair { a, b: &mut b.on, batch: batch.as_mut(), decoding: decoding.as_mut(), position, ids })
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
        (On::Chunk(waves), _) => Ok(time_prompt(&mut Reader { rows: batch, waves: Some(waves) }, ids)? * 1e3),
        (On::Steps(session), Some(decoding)) => time_launch(session.as_mut(), decoding, position),
        (On::Steps(_), None) => Err(Fault::internal("steps without sequences")),
    }
}
