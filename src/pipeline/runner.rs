//! Owns `Runner`: a prepared model that decodes, on the CPU or on a device, with one interface.

use std::hint;
use std::iter;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DriverError};
use crate::cuda::rows::RowLauncher;
use crate::cuda::session::{Session, SessionError};
use crate::defaults::rows::Room;
use crate::error::{Fault, Tier};
use crate::interp::{Input, Interp, Options};
use crate::lower::Batch;
use crate::manifest::Decode;
use crate::report::Report;
use crate::sample::{Decided, Request, RequestSettings, SampleError, SampleSettings, TokenCounts};
use crate::speculate::Speculation;
use crate::text::counted;

use super::batch::PAGE_ROWS;
use super::chain::{Chain, Host};
use super::checks::{self, Checking, Checks};
use super::device_rows::{Prefill, load_verifier};
use super::evaluate::ensure_checked;
use super::execute::{self, load_session, upload_pack};
use super::invariant;
use super::kernels::LoadedSet;
use super::speculative::{self, OneRow, Verifier};
use super::stages::{StoredSchedule, place_rows};
use super::text_steps::TextSteps;
use super::{Prepared, Workspace};

/// Tokens of a prompt in one step of the CPU, unless the manifest says otherwise.
const CHUNK_ROWS: u32 = 16;

/// Pause between two looks at the tokens of a running launch; a person does not notice such a delay.
const POLL: Duration = Duration::from_micros(200);

/// Snapshots of the recurrent state of a text: one of the step that verifies, and those of the last prompts.
pub(super) const SNAPSHOTS: usize = 3;
/// The slot of the step that verifies.
pub(super) const OF_STEP: usize = 0;
/// Tokens that a device decodes one at a time after a snapshot, for each 16 that it would read as a prompt: what is left of a prompt may be longer by
/// [`Prefill::PROMPT_MIN`]. A step of a batch kernel reads 16 tokens in about the time of a step of the decode kernel.
const READ_PER_STEP: usize = 16;

/// End-of-sequence ids that a kernel takes.
const EOS_MAX: usize = crate::codegen::abi::EOS_MAX;

/// Executes a prepared model: the interpreter for `cpu`, the kernel for a CUDA target whose device is here.
pub struct Runner<'a> {
    pub(super) place: String,
    pub(super) context_max: u32,
    pub(super) vocab: u32,
    /// Tokens whose keys and values the cache holds, from position 0 on.
    pub(super) cached: Vec<u32>,
    pub(super) on: On<'a>,
    /// Whether the model keeps a recurrent state: then a text goes back to a snapshot alone.
    pub(super) has_state: bool,
    /// For each slot, the position of a snapshot of `cached`.
    pub(super) snapshots: [Option<u32>; SNAPSHOTS],
}

/// Where a text goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// Positions below are in the cache.
    reused: usize,
    /// The snapshot of the recurrent state before this position; `None`: the state is there.
    slot: Option<usize>,
}

/// What a prompt was continued with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    /// Tokens of the prompt that were not decoded, because the cache held them.
    pub reused: usize,
}

/// What executes the steps of a runner.
pub(super) enum On<'a> {
    Cpu(Box<Interp>),
    Device {
        session: Box<Session>,
        prefill: LazyPrefill<'a>,
        verifier: LazyVerifier<'a>,
        steps_max: u32,
    },
    /// A device, by kernels that add up in one order.
    Invariant(Box<TextSteps>),
}

impl On<'_> {
    /// # Errors
    /// There is no session.
    pub(super) fn invariant(loaded: LoadedSet, steps_max: u32) -> Result<Self, Fault> {
        let sessions = loaded.steps.into_iter().map(|(_, session)| session).collect();
        let steps = TextSteps::new(sessions, steps_max).ok_or_else(|| Fault::internal("no kernel for one text"))?;
        Ok(On::Invariant(Box::new(steps)))
    }
}

/// The kernel that verifies proposed tokens, loaded before the first answer with proposals.
pub(super) struct LazyVerifier<'a> {
    load: LoadVerifier<'a>,
    device: Device,
    loaded: Option<Box<dyn RowLauncher>>,
}

/// Loads a kernel with at least so many rows on a device, beside a session.
type LoadVerifier<'a> = Box<dyn Fn(&Device, &Session, u32) -> Result<Box<dyn RowLauncher>, Fault> + 'a>;

impl<'a> LazyVerifier<'a> {
    pub(super) fn new(
        device: Device,
        load: impl Fn(&Device, &Session, u32) -> Result<Box<dyn RowLauncher>, Fault> + 'a,
    ) -> LazyVerifier<'a> {
        LazyVerifier { load: Box::new(load), device, loaded: None }
    }

    /// The kernel, with at least `rows` rows. The session `one` decodes where nothing is proposed.
    fn get(&mut self, one: &Session, rows: u32) -> Result<&mut dyn RowLauncher, Fault> {
        let LazyVerifier { load, device, loaded } = self;
        if loaded.as_ref().is_none_or(|loaded| loaded.shape().rows < rows) {
            let verifier = load(device, one, rows).map_err(|fault| {
                let remedy = fault.remedy.unwrap_or_else(|| "propose fewer tokens, or none".to_string());
                let message = format!("no kernel can verify proposed tokens: {}", fault.message);
                Fault { message, remedy: Some(remedy), ..fault }
            })?;
            *loaded = Some(verifier);
        }
        match loaded {
            Some(loaded) => Ok(loaded.as_mut()),
            None => Err(Fault::internal("a kernel that was loaded is gone")),
        }
    }
}

/// The kernel that reads prompts in chunks, loaded when the first prompt comes that is long enough for it.
pub(super) struct LazyPrefill<'a> {
    report: &'a Report,
    load: LoadPrefill<'a>,
    device: Device,
    /// `Some(None)`: it cannot be loaded, so the session reads prompts, one token a step.
    loaded: Option<Option<Box<Prefill>>>,
}

/// Loads the kernel on a device, beside a session.
type LoadPrefill<'a> = Box<dyn Fn(&Device, &Session) -> Result<Prefill, Fault> + 'a>;

impl<'a> LazyPrefill<'a> {
    pub(super) fn new(
        report: &'a Report,
        device: Device,
        load: impl Fn(&Device, &Session) -> Result<Prefill, Fault> + 'a,
    ) -> LazyPrefill<'a> {
        LazyPrefill { report, load: Box::new(load), device, loaded: None }
    }

    /// The kernel, beside the session that goes on after it. The user is told once why there is none.
    ///
    /// # Errors
    /// A kernel that computes something else, or another fault of this program.
    fn get(&mut self, one: &Session) -> Result<Option<&mut Prefill>, Fault> {
        let LazyPrefill { report, load, device, loaded } = self;
        if loaded.is_none() {
            *loaded = Some(match load(device, one) {
                Ok(prefill) => Some(Box::new(prefill)),
                Err(fault) if fault.tier == Tier::Internal => return Err(fault),
                Err(reason) => {
                    report.note(&format!("prompts are read one token a step: {}", reason.message));
                    None
                }
            });
        }
        Ok(loaded.as_mut().and_then(Option::as_deref_mut))
    }
}

impl Prepared {
    /// Packs the weights, checks what executes them unless that was done before, and loads it.
    ///
    /// # Errors
    /// No device of the target's kind, no compiler and no cubin, too little memory; a kernel that computes something else.
    pub fn runner<'a>(&'a self, workspace: &'a Workspace) -> Result<Runner<'a>, Fault> {
        let schedule = self.validated.schedule();
        let host = Host::new(workspace);
        let chain = self.chain(workspace, &host);
        let (context_max, vocab) = (schedule.program.context_max, self.imported.graph.vocab);
        let has_state = schedule.program.has_state();
        let Some(found) = host.device(&self.target)? else {
            let rows = self.text_on_cpu(&chain)?;
            // The interpreter does the same for a row of any schedule.
            if self.checking == Checking::Required {
                ensure_checked(&chain)?;
            }
            let interp = Interp::of_text(rows.validated(&self.target)?.schedule(), chain.pack()?, Options::fast())?;
            let place = execute::cpu_place();
            let on = On::Cpu(Box::new(interp));
            return Ok(Runner {
                place,
                context_max,
                vocab,
                cached: vec![],
                on,
                has_state,
                snapshots: [None; SNAPSHOTS],
            });
        };
        let steps_max = self.manifest.decode.steps_per_launch;
        let place = execute::place_of(found, &self.target);
        let device = execute::open(found, &self.target)?;
        if invariant::is_asked(&self.manifest, &self.target) {
            let positions = u64::from(context_max);
            let made = invariant::make(&chain, Room { rows: 0, sequences: 1, positions })?;
            let pack = upload_pack(&device, made.validated(), &chain.pack()?)?;
            if self.checking == Checking::Required {
                let of_host = || Ok(chain.pack()?);
                let mut load = || made.load(&device, &self.target, checks::STEPS_MAX, &pack, None);
                Checks::of(&chain, found, &of_host)?.ensure(&made, &mut load)?;
            }
            let on = On::invariant(made.load(&device, &self.target, steps_max, &pack, None)?, steps_max)?;
            return Ok(Runner {
                place,
                context_max,
                vocab,
                cached: vec![],
                on,
                has_state,
                snapshots: [None; SNAPSHOTS],
            });
        }
        let cubin = chain.cubin()?.ok_or_else(|| Fault::internal("a target with a kernel has no cubin"))?;
        if self.checking == Checking::Required {
            ensure_checked(&chain)?;
        }
        let pack = chain.pack()?;
        let session = load_session(workspace, &device, &self.validated, &cubin.bytes, &pack, Trace::Off, steps_max)?;
        let verifier =
            LazyVerifier::new(device.clone(), |device, one, rows| load_verifier(workspace, self, device, one, rows));
        let prefill =
            LazyPrefill::new(&workspace.report, device, |device, one| Prefill::load(workspace, self, device, one));
        let on = On::Device { session: Box::new(session), prefill, verifier, steps_max };
        Ok(Runner { place, context_max, vocab, cached: vec![], on, has_state, snapshots: [None; SNAPSHOTS] })
    }

    /// What decodes one text on the CPU: of several rows, so that a weight is read once for all tokens of a prompt chunk.
    pub(super) fn text_on_cpu(&self, chain: &Chain<'_>) -> Result<StoredSchedule, Fault> {
        let (batches, keys) = one_text(&self.manifest.decode, self.imported.graph.has_state());
        Ok(place_rows(&chain.context, &self.candidate, &batches, keys)?.1)
    }
}

/// Steps of one text on the CPU: a chunk of its prompt, or one token. The first that fits counts; a chunk that the manifest asks for is the
/// only one. Also what the user lowers where it does not fit.
pub(super) fn one_text(decode: &Decode, has_state: bool) -> (Vec<Batch>, &'static [&'static str]) {
    let rows = decode.chunk_max.unwrap_or(CHUNK_ROWS).min(decode.context_max);
    let pages = decode.cache_pages.unwrap_or(decode.context_max.div_ceil(PAGE_ROWS));
    let fewer = |rows: &u32| (*rows > 1 && decode.chunk_max.is_none()).then_some(rows / 2);
    let sequences = if has_state { 1 + SNAPSHOTS as u32 } else { 1 };
    let batch = |rows| Batch { rows, sequences, pages, page_rows: PAGE_ROWS, words: false };
    let keys: &[&str] = if decode.chunk_max.is_some() { &["decode.chunk_max"] } else { &[] };
    (iter::successors(Some(rows), fewer).map(batch).collect(), keys)
}

impl Runner<'_> {
    /// Where it runs, for the user: `cpu interpreter on 2 threads`, `NVIDIA H200 (device 0)`.
    pub fn place(&self) -> String {
        self.place.clone()
    }

    /// Positions that the cache has room for.
    pub fn context_max(&self) -> u32 {
        self.context_max
    }

    /// Logits of one position.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// Logits after each of `ids` from position 0, whatever the model would have chosen: `on_row(position, logits)`,
    /// `logits` of `[vocab]`.
    ///
    /// # Errors
    /// More ids than the context has positions; an id outside the vocabulary.
    pub fn logits(&mut self, ids: &[u32], on_row: &mut dyn FnMut(u32, &[f32])) -> Result<(), Fault> {
        self.check_ids(ids)?;
        self.forget();
        match &mut self.on {
            On::Cpu(interp) => {
                interp.reset();
                let inputs: Vec<Input> = ids.iter().copied().map(Input::Token).collect();
                let mut row = vec![];
                interp.launch(&inputs, |step| {
                    step.logits.copy_to(&mut row);
                    on_row(step.position, &row);
                    ControlFlow::Continue(())
                })?;
            }
            On::Device { session, prefill, steps_max, .. } => {
                if ids.len() >= Prefill::PROMPT_MIN
                    && let Some(prefill) = prefill.get(session)?
                {
                    return prefill.read(ids, on_row);
                }
                session.start(ids, &[])?;
                let mut position = 0;
                while (position as usize) < ids.len() {
                    let steps = (*steps_max).min(ids.len() as u32 - position);
                    session.run(position, steps, true)?;
                    let logits = session.logits(steps)?;
                    for (at, row) in (position..).zip(logits.chunks_exact(self.vocab.max(1) as usize)) {
                        on_row(at, row);
                    }
                    position += steps;
                }
            }
            On::Invariant(steps) => steps.logits(ids, on_row)?,
        }
        Ok(())
    }

    /// Loads the kernels that an answer to `prompt` needs beside that for one row, and with proposals of `proposed` tokens the one that
    /// verifies them. They are loaded once. Without this call the answer loads them, and its first token waits for that.
    ///
    /// # Errors
    /// As [`Runner::speculate`], of the prompt and of the kernel that verifies.
    pub fn make_ready(&mut self, prompt: &[u32], proposed: usize) -> Result<(), Fault> {
        self.check_ids(prompt)?;
        let reused = if proposed == 0 { self.found(prompt).reused } else { 0 };
        let On::Device { session, prefill, verifier, .. } = &mut self.on else { return Ok(()) };
        let (verifies, reads) = (proposed > 0, reads_in_chunks(prompt, reused));
        if verifies || reads {
            // A check writes the cache.
            self.cached.clear();
            self.snapshots = [None; SNAPSHOTS];
        }
        if verifies {
            verifier.get(session, rows_of(proposed))?;
        }
        if reads {
            prefill.get(session)?;
        }
        Ok(())
    }

    /// Tokens of `prompt` that the cache holds. The last one is decoded in any case, for its logits.
    fn reused(&self, prompt: &[u32]) -> usize {
        let shared = self.cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        shared.min(prompt.len().saturating_sub(1))
    }

    /// Forgets the text before.
    fn forget(&mut self) {
        self.cached.clear();
        self.snapshots = [None; SNAPSHOTS];
    }

    /// As [`Runner::reused`]; where the recurrent state is that of another position, as far as the last snapshot before.
    fn found(&self, prompt: &[u32]) -> Found {
        let reused = self.reused(prompt);
        let goes_on = match &self.on {
            On::Cpu(interp) => interp.goes_on_at(reused as u32),
            On::Device { session, .. } => session.finds_state(reused as u32),
            On::Invariant(steps) => steps.goes_on_at(reused as u32),
        };
        if goes_on {
            return Found { reused, slot: None };
        }
        let is_worth = |position: usize| {
            let (left, whole) = (prompt.len() - position, prompt.len());
            matches!(self.on, On::Cpu(_)) || left <= whole / READ_PER_STEP + Prefill::PROMPT_MIN
        };
        let kept = (0..).zip(self.snapshots).filter_map(|(slot, position)| Some((position? as usize, slot)));
        let best = kept.filter(|(position, _)| *position <= reused && is_worth(*position)).max();
        best.map_or(Found { reused: 0, slot: None }, |(reused, slot)| Found { reused, slot: Some(slot) })
    }

    /// Forgets snapshots after the first `reused` tokens, which the next text does not have. Returns the slot for that of its prompt.
    fn slot_of_prompt(&mut self, reused: usize) -> usize {
        self.snapshots[OF_STEP] = None;
        for position in &mut self.snapshots {
            *position = position.filter(|position| *position as usize <= reused);
        }
        // That of the shorter text makes room.
        (OF_STEP + 1..SNAPSHOTS).min_by_key(|slot| self.snapshots[*slot]).unwrap_or(OF_STEP)
    }

    /// Continues `prompt` with at most `max_tokens` tokens, and at most as many as the context has room for; stops after
    /// the first of `eos`, which is part of the result. `on_token` sees each token as soon as it is decided.
    ///
    /// # Errors
    /// An empty prompt, a prompt longer than the context, an id outside the vocabulary, sampling settings out of range.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        eos: &[u32],
        sampling: &SampleSettings,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, Fault> {
        let request = RequestSettings::plain(*sampling).resolve(self.vocab, eos)?;
        self.forget();
        let answer = self.answer(prompt, max_tokens, &request, &mut |decided| on_token(decided.token))?;
        Ok(answer.tokens)
    }

    /// Continues `prompt` as [`Runner::generate`] does, with tokens that `request` chooses and until it ends. Tokens that the
    /// prompt shares with the sequence before, from the first one on, are in the cache and are not decoded again.
    ///
    /// # Errors
    /// An empty prompt, a prompt longer than the context, an id outside the vocabulary; on a device without `batch_invariant`, a request
    /// with settings that kernels do not have; nothing that may come next.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        request: &Request,
        on_token: &mut dyn FnMut(&Decided) -> ControlFlow<()>,
    ) -> Result<Answer, Fault> {
        let count = self.tokens_max(prompt, max_tokens)?;
        if count == 0 {
            return Ok(Answer { tokens: vec![], reused: 0 });
        }
        let mut tell = stop_at_end(request, on_token);
        let Found { reused, slot } = self.found(prompt);
        let of_prompt = self.slot_of_prompt(reused);
        let mut snapshots = self.snapshots;
        // A fault leaves nothing to be trusted.
        self.forget();
        let tokens = match &mut self.on {
            On::Cpu(interp) => {
                match (reused, slot) {
                    (0, _) => interp.reset(),
                    (_, Some(slot)) => interp.go_back(slot)?,
                    _ => interp.seek(reused as u32)?,
                }
                if of_prompt < interp.snapshots_max() {
                    interp.keep_state(prompt.len() as u32, of_prompt);
                    snapshots[of_prompt] = Some(prompt.len() as u32);
                }
                if request.sampler().is_greedy() && request.beyond_kernels().is_empty() {
                    decide_by_schedule(interp, prompt, count, self.vocab, &mut tell)?
                } else {
                    decide_on_host(interp, prompt, count, request, &mut tell)?
                }
            }
            On::Device { session, prefill, steps_max, .. } => {
                refuse_beyond_kernels(request)?;
                session.sample(*request.sampler());
                if let Some(slot) = slot {
                    session.go_back(slot)?;
                }
                let prefill = if reads_in_chunks(prompt, reused) { prefill.get(session)? } else { None };
                let (mut from, mut first) = (reused as u32, None);
                if let Some(prefill) = prefill {
                    // Where it decides nothing, the kernel for one row reads the last token.
                    (from, first) = (prompt.len() as u32 - 1, prefill.decide(prompt, request.sampler())?);
                    session.state_is_before(if first.is_some() { from + 1 } else { from });
                    keep_state(session, of_prompt)?;
                }
                let keep = (self.has_state && first.is_none()).then_some(of_prompt);
                let bounds = Bounds { from, steps_max: *steps_max, count, vocab: self.vocab, keep };
                let tokens = go_on_device(session, (prompt, first), bounds, &kernel_ends(request), &mut |token| {
                    tell(&Decided { token, logprob: None, top: vec![] })
                })?;
                snapshots[of_prompt] = session.kept(of_prompt);
                tokens
            }
            On::Invariant(steps) => steps.decide(prompt, reused, count, request, None, &mut tell)?,
        };
        self.keep(prompt, &tokens);
        self.snapshots = snapshots;
        Ok(Answer { tokens, reused })
    }

    /// Continues `prompt` as [`Runner::answer`] does, with steps that verify what `speculation` proposes. On a CPU, and with
    /// `batch_invariant`, the tokens are the same. Otherwise a device computes proposed tokens with another kernel, whose sums have another
    /// order: if two tokens are about equally probable, it may choose the other one. Nothing of the sequence before is used again.
    ///
    /// # Errors
    /// As [`Runner::answer`]; proposals of more tokens than a step has rows for; on a device, why there is no kernel that verifies.
    pub fn speculate(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        request: &Request,
        speculation: &mut Speculation<'_>,
        on_token: &mut dyn FnMut(&Decided) -> ControlFlow<()>,
    ) -> Result<Answer, Fault> {
        let count = self.tokens_max(prompt, max_tokens)?;
        self.forget();
        if count == 0 {
            return Ok(Answer { tokens: vec![], reused: 0 });
        }
        let mut tell = stop_at_end(request, on_token);
        let tokens = match &mut self.on {
            On::Cpu(interp) => speculative::decide_on_cpu(interp, prompt, count, request, speculation, &mut tell)?,
            On::Device { session, prefill, verifier, steps_max } => {
                refuse_beyond_kernels(request)?;
                session.sample(*request.sampler());
                let verifier = verifier.get(session, rows_of(speculation.most()))?;
                let prefill = if reads_in_chunks(prompt, 0) { prefill.get(session)? } else { None };
                let ends = kernel_ends(request);
                let one = OneRow { session, steps_max: *steps_max, ends: &ends };
                let verifier = Verifier { rows: verifier, sampler: *request.sampler() };
                speculative::decide_on_device(one, verifier, prefill, prompt, count, speculation, &mut tell)?
            }
            On::Invariant(_) if speculation.sees() => {
                return Err(Fault::internal("kernels that add up in one order leave nothing for a draft"));
            }
            On::Invariant(_) if self.has_state => return Err(refuse_state("--lookup")),
            On::Invariant(steps) => steps.decide(prompt, 0, count, request, Some(speculation), &mut tell)?,
        };
        self.keep(prompt, &tokens);
        Ok(Answer { tokens, reused: 0 })
    }

    /// Tokens that can follow a prompt, at most `max_tokens`. The last one needs no position of its own: nothing is decoded after it.
    ///
    /// # Errors
    /// An empty prompt, a prompt longer than the context, an id outside the vocabulary.
    fn tokens_max(&self, prompt: &[u32], max_tokens: usize) -> Result<usize, Fault> {
        self.check_ids(prompt)?;
        if prompt.is_empty() {
            return Err(Fault::input("the prompt has no token, expected at least one")
                .with_remedy("name a token with `--ids`, or write a prompt"));
        }
        Ok(max_tokens.min(self.context_max as usize - prompt.len() + 1))
    }

    /// Notes what the cache holds after an answer.
    fn keep(&mut self, prompt: &[u32], tokens: &[u32]) {
        self.cached.extend(prompt.iter().chain(tokens));
        self.cached.pop();
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), Fault> {
        let context_max = self.context_max;
        if ids.len() > context_max as usize {
            let message =
                format!("the prompt has {}, `context_max` is {context_max}", counted(ids.len() as u64, "token"));
            return Err(Fault::input(message).with_remedy("raise `decode.context_max` or shorten the prompt"));
        }
        match ids.iter().find(|&&id| id >= self.vocab) {
            Some(id) => Err(Fault::input(format!("token {id} is not below the vocabulary of {}", self.vocab))),
            None => Ok(()),
        }
    }
}

/// Kernels that add up in one order keep no snapshot of a recurrent state.
fn refuse_state(what: &str) -> Fault {
    let message =
        "verifies tokens that may be taken back, and with `batch_invariant` no snapshot of a recurrent state is kept";
    Fault::input(format!("`{what}` {message}")).with_remedy(format!("leave out `{what}`, or `decode.batch_invariant`"))
}

/// Whether a device reads a prompt in chunks, of which the cache holds `reused` tokens.
fn reads_in_chunks(prompt: &[u32], reused: usize) -> bool {
    reused == 0 && prompt.len() > Prefill::PROMPT_MIN
}

/// Rows of a step that verifies this many tokens.
fn rows_of(proposed: usize) -> u32 {
    u32::try_from(proposed).unwrap_or(u32::MAX).saturating_add(1)
}

/// Tells each token, and stops after one that ends the request.
fn stop_at_end<'a>(
    request: &'a Request,
    on_token: &'a mut dyn FnMut(&Decided) -> ControlFlow<()>,
) -> impl FnMut(&Decided) -> ControlFlow<()> + 'a {
    move |decided| {
        let stop = on_token(decided).is_break() || request.end(decided.token).is_some();
        if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// The ids that end a request, for a kernel; none if there are more than it takes, and then only the host looks for them.
fn kernel_ends(request: &Request) -> Vec<u32> {
    let ends = request.end_ids();
    if ends.len() <= EOS_MAX { ends } else { vec![] }
}

fn refuse_beyond_kernels(request: &Request) -> Result<(), Fault> {
    match request.beyond_kernels() {
        [] => Ok(()),
        names => Err(Fault::input(format!("the kernel of a device does not have {}", names.join(", ")))
            .with_remedy("run on a target of kind `cpu`, or choose by temperature, top-k and top-p alone")),
    }
}

/// Decodes the prompt from the interpreter's position on, and takes the tokens that the schedule selects.
fn decide_by_schedule(
    interp: &mut Interp,
    prompt: &[u32],
    count: usize,
    vocab: u32,
    tell: &mut dyn FnMut(&Decided) -> ControlFlow<()>,
) -> Result<Vec<u32>, Fault> {
    let mut tokens = vec![];
    let mut none = None;
    let mut take = |token| {
        tokens.push(token);
        tell(&Decided { token, logprob: None, top: vec![] })
    };
    // A token is known when the next step has selected it; the last one is selected after the launch.
    let mut inputs: Vec<Input> = prompt.iter().skip(interp.position() as usize).copied().map(Input::Token).collect();
    inputs.extend(iter::repeat_n(Input::Selected, count - 1));
    let mut stopped = false;
    interp.launch_for_choice(&inputs, |step| {
        if step.position as usize >= prompt.len() {
            stopped = take(step.token).is_break();
        }
        // The schedule would choose some token even where there is none to choose.
        if !stopped && step.position as usize + 1 >= prompt.len() && !step.logits.has_candidate() {
            none = Some(SampleError::NoCandidate { position: step.position + 1, vocab: vocab as usize });
        }
        if stopped || none.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(none) = none {
        return Err(none.into());
    }
    if !stopped && let Some(token) = interp.selected() {
        let _ = take(token);
    }
    Ok(tokens)
}

/// Decodes the prompt from the interpreter's position on: the logits after its last token.
///
/// # Errors
/// What the interpreter refuses.
pub(super) fn logits_after(interp: &mut Interp, prompt: &[u32]) -> Result<Vec<f32>, Fault> {
    let inputs: Vec<Input> = prompt.iter().skip(interp.position() as usize).copied().map(Input::Token).collect();
    let mut logits = vec![];
    interp.launch_for_choice(&inputs, |step| {
        if step.position as usize + 1 == prompt.len() {
            step.logits.copy_to(&mut logits);
        }
        ControlFlow::Continue(())
    })?;
    Ok(logits)
}

/// Decodes the prompt from the interpreter's position on, and takes the tokens that the request chooses from the logits.
fn decide_on_host(
    interp: &mut Interp,
    prompt: &[u32],
    count: usize,
    request: &Request,
    tell: &mut dyn FnMut(&Decided) -> ControlFlow<()>,
) -> Result<Vec<u32>, Fault> {
    let mut logits = logits_after(interp, prompt)?;
    let mut counts = TokenCounts::new(prompt);
    let mut tokens = vec![];
    loop {
        let decided = request.choose(&logits, &counts, None)?;
        counts.push(decided.token);
        tokens.push(decided.token);
        if tell(&decided).is_break() || tokens.len() == count {
            return Ok(tokens);
        }
        logits = interp.step(Input::Token(decided.token))?;
    }
}

/// What is to be decoded on a device.
struct Bounds {
    /// The first position whose row the cache does not hold.
    from: u32,
    /// Steps of a launch, at most.
    steps_max: u32,
    /// Tokens to decide, at most.
    count: usize,
    vocab: u32,
    /// The slot for the recurrent state at the end of the prompt; `None`: it is not kept.
    keep: Option<usize>,
}

/// Keeps the recurrent state for prompts to come, if there is memory for it: without it they take longer.
fn keep_state(session: &mut Session, slot: usize) -> Result<(), SessionError> {
    match session.keep_state(slot) {
        Err(SessionError::Driver(DriverError::OutOfMemory { .. })) => Ok(()),
        other => other,
    }
}

/// As [`decide_on_device`]; `first`: what was chosen after the prompt, of which the cache has all then.
fn go_on_device(
    session: &mut Session,
    (prompt, first): (&[u32], Option<u32>),
    bounds: Bounds,
    eos: &[u32],
    tell: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>, Fault> {
    let Some(first) = first else { return decide_on_device(session, prompt, bounds, eos, tell) };
    if first + 1 == bounds.vocab {
        session.start(prompt, eos)?;
        check_candidate(session, prompt, bounds.vocab)?;
    }
    let mut tokens = vec![first];
    if tell(first).is_continue() && bounds.count > 1 {
        let text = [prompt, &[first]].concat();
        let bounds = Bounds { from: prompt.len() as u32, count: bounds.count - 1, keep: None, ..bounds };
        tokens.extend(decide_on_device(session, &text, bounds, eos, tell)?);
    }
    Ok(tokens)
}

/// Lets the device choose, and tells each token while the launch that decided it still runs.
fn decide_on_device(
    session: &mut Session,
    prompt: &[u32],
    bounds: Bounds,
    eos: &[u32],
    tell: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>, Fault> {
    let Bounds { from, steps_max, count, vocab, keep } = bounds;
    session.start(prompt, eos)?;
    let last = (prompt.len() + count - 1) as u32;
    let mut tokens = vec![];
    let mut position = from;
    while position < last {
        let to_end = prompt.len() as u32 - position.min(prompt.len() as u32);
        let ends = keep.is_some() && to_end > 0;
        let steps = steps_max.min(last - position).min(if ends { to_end } else { u32::MAX });
        // The kernel selects and reports the token after its last step as well.
        let timeout_ms = session.launch(position, steps, false)?;
        let mut stopped = false;
        let mut catch_up = |session: &Session, tokens: &mut Vec<u32>| -> Result<(), SessionError> {
            let decided = session.decided()?;
            while !stopped && prompt.len() + tokens.len() < decided as usize {
                let token = session.token((prompt.len() + tokens.len()) as u32)?;
                tokens.push(token);
                stopped = tell(token).is_break();
            }
            Ok(())
        };
        // A launch that hangs ends by its own deadline; `finish` tells why.
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        while Instant::now() < deadline {
            catch_up(session, &mut tokens)?;
            if session.decided()? >= position + steps || session.is_done()? {
                break;
            }
            // A person waits for the first token, and a sleep would be longer than the launch takes to begin.
            if tokens.is_empty() { hint::spin_loop() } else { thread::sleep(POLL) }
        }
        session.finish(timeout_ms)?;
        catch_up(session, &mut tokens)?;
        if let Some(slot) = keep.filter(|_| ends && steps == to_end) {
            keep_state(session, slot)?;
        }
        // A kernel that finds no number among the logits chooses the last id.
        let new = (position as usize + 1).saturating_sub(prompt.len());
        if let Some(at) = tokens.iter().skip(new).position(|token| token + 1 == vocab) {
            let text = [prompt, &tokens[..new + at]].concat();
            check_candidate(session, &text, vocab)?;
            if let Some(&last) = tokens.last().filter(|_| !stopped) {
                if !session.finds_state(position + steps) {
                    let text = [prompt, &tokens].concat();
                    session.decode_again(&text[..(position + steps) as usize])?;
                }
                session.go_on(position + steps, last)?;
            }
        }
        if stopped {
            return Ok(tokens);
        }
        position += steps;
    }
    Ok(tokens)
}

/// Decodes the last token of `text` once more, whose row the cache has, and looks at the logits. With a recurrent state, which is after it,
/// all of the text.
///
/// # Errors
/// No logit is a number above -inf.
fn check_candidate(session: &mut Session, text: &[u32], vocab: u32) -> Result<(), Fault> {
    let position = text.len() as u32 - 1;
    if session.finds_state(position) {
        session.go_on(position, text[text.len() - 1])?;
    } else {
        session.decode_again(&text[..position as usize])?;
        session.go_on(position, text[text.len() - 1])?;
    }
    session.run(position, 1, true)?;
    if session.logits(1)?.iter().any(|logit| *logit > f32::NEG_INFINITY) {
        return Ok(());
    }
    Err(SampleError::NoCandidate { position: position + 1, vocab: vocab as usize }.into())
}
