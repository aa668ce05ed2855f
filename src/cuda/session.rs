//! Owns `Session`: a kernel with all its device memory; loaded once, launched many times, always watched.

use super::driver::{Device, DriverError};
use super::given::GivenRows;
pub use super::given::{GivenWith, LeftNorm, left_of};
use super::kernel::{Kernel, Watched, cache_or_own, first_buffer, poisoned, vocab};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::peers::{CacheMap, Meeting, Peer, all_or_none, distances, together};
use super::rows::choose_now;
use super::sampler::{Asked, Next, SamplerSession};
use super::staging::Staging;
use super::states::StateRows;
use super::stream::{Event, Stream};
use crate::codegen::abi::{DevicesParams, EOS_MAX, PagedDevicesParams, PagedParams, Params, Queues};
use crate::codegen::emit::Trace;
use crate::error::Fault;
use crate::ir::layout::pack_bytes;
use crate::ir::op::Role;
use crate::ir::{BufferId, EventId, SmId, TaskId};
use crate::rows::{SequenceId, Shape};
use crate::sample::Sampler;
use crate::speculate::Left;
use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// What each SM waited for in a launch that was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    pub sm: SmId,
    /// Of several devices that ran a step together, its own.
    pub device: Option<u32>,
    /// The step, or the wave of a wave kernel.
    pub step: u32,
    /// `None`: the loader, or a wave kernel, which has no tasks.
    pub task: Option<TaskId>,
    pub event: Option<EventId>,
    pub kind: StuckOn,
    pub observed: u32,
    pub expected: u32,
    /// The grid of the task, if there is one.
    pub grid: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StuckOn {
    Packet,
    RingFull,
    RingEmpty,
    History,
    /// The other SMs' end of the wave before.
    Wave,
    /// The sums of the other block of a pair.
    Peer,
    /// What the loader of its block has drawn a ticket for.
    Turn,
    Unknown(u32),
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = self.device {
            write!(f, "device {device}, ")?;
        }
        write!(f, "{}: step {}: ", self.sm, self.step)?;
        match (self.task, self.kind) {
            (Some(task), _) => write!(f, "{task}")?,
            (None, StuckOn::Packet | StuckOn::Wave | StuckOn::Peer | StuckOn::Turn) => f.write_str("a wave")?,
            (None, _) => f.write_str("the loader")?,
        }
        if let Some(grid) = &self.grid {
            write!(f, " ({grid})")?;
        }
        f.write_str(" waited for ")?;
        match self.kind {
            StuckOn::Packet => match self.event {
                Some(event) => write!(f, "packets of {event}")?,
                None => f.write_str("packets")?,
            },
            StuckOn::RingFull => f.write_str("a chunk to land")?,
            StuckOn::RingEmpty => f.write_str("a free ring slot")?,
            StuckOn::History => f.write_str("the step's cache to be acquired")?,
            StuckOn::Wave => f.write_str("all SMs to end the wave before")?,
            StuckOn::Peer => f.write_str("the sums of the other block of its pair")?,
            StuckOn::Turn => f.write_str("its next item")?,
            StuckOn::Unknown(kind) => write!(f, "something of kind {kind}")?,
        }
        write!(f, ": expected {}, saw {}", self.expected, self.observed)
    }
}

#[derive(Debug, Error)]
pub enum SessionError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("the launch gave up after {timeout_ms} ms:\n{}", render(.stuck))]
    Hung { timeout_ms: u64, stuck: Vec<Stuck> },
    #[error("the kernel did not leave after its deadline and the abort word; the device is lost to this process")]
    Lost,
    #[error("position {position} and {steps} steps do not fit a context of {context_max}")]
    Range { position: u32, steps: u32, context_max: u32 },
    #[error("a launch continues at position {expected}, found {found}")]
    NotContinuing { expected: u32, found: u32 },
    #[error("the kernel is for {expected} devices, found {found}")]
    Devices { expected: u32, found: u32 },
    #[error("the cache is shared with another kernel, so no history can be put into it")]
    Shared,
    #[error(
        "position {position} does not follow the one whose recurrent state is kept, expected position 0 or the next one"
    )]
    State { position: u32 },
    #[error("a draft is given rows of {expected} values, found {found}")]
    Given { expected: u32, found: usize },
    #[error("the last step left nothing of row {row}")]
    NothingLeft { row: u32 },
    #[error("no recurrent state was kept in slot {slot}")]
    NoSnapshot { slot: usize },
    #[error("{found} end-of-sequence ids, the kernel takes at most {EOS_MAX}")]
    EosCount { found: usize },
    #[error("token {token} is not below the vocabulary of {vocab}")]
    Token { token: u32, vocab: u32 },
    #[error("row {row} decided no token in the step before this launch")]
    Undecided { row: u32 },
    #[error("a launch was waited for, and none is queued")]
    NotQueued,
    #[error("a launch whose rows want no logits has none, and its tokens have to be given")]
    NoLogits,
    #[error("a launch was not waited for")]
    NotFinished,
    #[error("a launch was waited for before its tokens were chosen")]
    NotChosen,
    #[error("the warps of a block share {needed} registers, and the compiled kernel gives it {found}")]
    Registers { needed: u32, found: u32 },
}

fn render(stuck: &[Stuck]) -> String {
    let mut lines: Vec<String> = stuck.iter().take(8).map(|s| format!("    {s}")).collect();
    if stuck.len() > 8 {
        lines.push(format!("    and {} more SMs", stuck.len() - 8));
    }
    if lines.is_empty() {
        lines.push("    no SM reported what it waited for".to_string());
    }
    lines.join("\n")
}

impl From<SessionError> for Fault {
    fn from(error: SessionError) -> Fault {
        match error {
            SessionError::Driver(e) => e.into(),
            SessionError::Range { .. }
            | SessionError::NotContinuing { .. }
            | SessionError::State { .. }
            | SessionError::EosCount { .. }
            | SessionError::Token { .. } => Fault::input(error.to_string()),
            SessionError::Hung { .. }
            | SessionError::Lost
            | SessionError::Shared
            | SessionError::Devices { .. }
            | SessionError::NoSnapshot { .. }
            | SessionError::Given { .. }
            | SessionError::NothingLeft { .. }
            | SessionError::Undecided { .. }
            | SessionError::NoLogits
            | SessionError::Registers { .. }
            | SessionError::NotQueued
            | SessionError::NotChosen
            | SessionError::NotFinished => Fault::internal(error.to_string()),
        }
    }
}

/// `top_p_q32` in 32 bits: 2^32, which admits everything, is 0. What rounds to 0 admits one id, and so does 1.
fn top_p_word(top_p_q32: u64) -> u32 {
    u32::try_from(top_p_q32.max(1)).unwrap_or(0)
}

/// A step at full speed takes milliseconds; the deadline is for faults.
fn timeout(steps: u32) -> Duration {
    Duration::from_millis(1000 + 10 * u64::from(steps))
}

/// Tokens of more bytes are waited for on their way to the device.
const TOKENS_BYTES: usize = 4096;

/// The last tag of a step: packets of zeros have tag 0, and the step after the last one is reported with a tag, too.
const TAG_LAST: u32 = u32::MAX - 1;

/// A kernel on a device with its weights, cache and tables.
pub struct Session {
    kernel: Kernel,
    cache: Arc<DeviceBuffer>,
    cache_bytes: u64,
    exchange: DeviceBuffer,
    logits: DeviceBuffer,
    prompt: DeviceBuffer,
    /// Through it tokens go to the device.
    staging: Staging,
    mailbox: MappedBuffer,
    best_packet: u64,
    best_cols: u32,
    prompt_len: u32,
    eos: Vec<u32>,
    choosing: Choosing,
    tag: u32,
    /// The position a launch may continue at without arming the arg-max pairs again.
    next: Option<u32>,
    /// The last step published arg-max pairs, with the tag before the next one.
    is_armed: bool,
    steps_max: u32,
    vocab: u32,
    /// Set if the cache is a pool of pages.
    pages: Option<Pages>,
    /// Of a cache without pages: where its recurrent states are. With pages, the guard of their tables knows it.
    states: Option<StateAt>,
    /// Of a cache without pages: what its snapshots need, and these once there is one.
    device: Option<Device>,
    snapshots: BTreeMap<usize, Snapshot>,
    /// The end of copies of states that were not waited for.
    copied: Option<Event>,
    /// Of a draft: what its steps are given.
    given: Option<GivenRows>,
    /// The first position of the last launch.
    launched_from: u32,
    /// The other devices, and which has which part of the cache.
    peers: Vec<Peer>,
    cache_map: CacheMap,
    meeting: Meeting,
}

/// Where the recurrent states of a session are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StateAt {
    /// Before this position.
    Before(u32),
    /// A launch that gave up may have left them anywhere.
    Unknown,
}

/// A copy of recurrent states.
struct Snapshot {
    /// Of each device.
    memory: Vec<DeviceBuffer>,
    /// They are those before this position.
    before: u32,
}

/// The pages of a sequence on a device.
pub(super) struct Pages {
    /// Copies while a launch runs.
    copies: Stream,
    /// One may be read by a launch that runs while the other is written.
    slots: [DeviceBuffer; 2],
    current: usize,
    /// What the current one holds.
    on_host: Vec<u32>,
    /// Whose pages they are.
    sequence: SequenceId,
}

impl Pages {
    pub fn new(device: &Device, shape: &Shape) -> Result<Pages, DriverError> {
        let slot = || device.alloc((u64::from(shape.blocks()) * 4).max(16));
        Ok(Pages {
            copies: device.stream()?,
            slots: [slot()?, slot()?],
            current: 0,
            on_host: vec![],
            sequence: SequenceId(0),
        })
    }

    /// Sets the pages of the sequence that the next launches go on with.
    fn place(&mut self, sequence: SequenceId, pages: &[u32]) -> Result<(), DriverError> {
        self.sequence = sequence;
        if self.on_host != pages {
            self.current = 1 - self.current;
            self.slots[self.current].upload(&self.copies, 0, pages)?;
            self.on_host = pages.to_vec();
        }
        Ok(())
    }

    /// What a launch passes.
    fn params(&self, params: Params) -> PagedParams {
        let pages = self.slots[self.current].address();
        PagedParams { params, pages, sequence: self.sequence.0, reserved_of_pages: 0 }
    }
}

/// How a launch chooses tokens, as the kernel is told.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Choosing {
    /// 0: greedily.
    inverse_temperature: f32,
    seed: u64,
    /// As [`Params`] has them.
    top_k: u32,
    top_p_q32: u32,
    /// Top-k and top-p choose among all logits of the step before.
    is_filtered: bool,
}

impl Choosing {
    fn of(sampler: &Sampler) -> Choosing {
        let ([key_low, key_high], is_filtered) = (sampler.key(), sampler.is_filtered());
        Choosing {
            inverse_temperature: if sampler.is_greedy() { 0.0 } else { sampler.inv_temperature() },
            seed: u64::from(key_high) << 32 | u64::from(key_low),
            top_k: if is_filtered { sampler.top_k() } else { 0 },
            top_p_q32: if is_filtered { top_p_word(sampler.top_p_q32()) } else { 0 },
            is_filtered,
        }
    }
}

/// Result of one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launched {
    /// Device time between the events around the launch.
    pub device_us: f64,
    /// Positions whose token is decided: `tokens[p]` for `p` below this.
    pub decided: u32,
}

/// What a launch of a kernel with time stamps left.
#[derive(Debug, Clone, PartialEq)]
pub struct Stamped {
    /// As `trace` reads them.
    pub words: Vec<u64>,
    /// Tasks of one SM and step that they have room for.
    pub tasks_max: usize,
    /// Device time between the events around the launch.
    pub device_us: f64,
}

impl Session {
    /// Loads the queues of a proven schedule and everything they need. `steps_max` bounds the steps of a launch (it sizes the logits
    /// buffer).
    ///
    /// `fill` uploads the pack: it is given the buffer and the stream, so that a large pack can come piece by piece.
    pub fn load(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        fill: impl FnOnce(&Stream, &mut DeviceBuffer) -> Result<(), SessionError>,
    ) -> Result<Session, SessionError> {
        let stream = device.stream()?;
        let mut pack = device.alloc(pack_bytes(queues.validated().schedule()).max(16))?;
        fill(&stream, &mut pack)?;
        stream.synchronize()?;
        Session::load_sharing(device, queues, cubin, trace, steps_max, Arc::new(pack))
    }

    /// The weights of this session, to share with another one whose pack has the same bytes.
    pub fn pack(&self) -> Arc<DeviceBuffer> {
        self.kernel.pack.clone()
    }

    /// The cache arena, to share with another kernel whose caches lie at the same places.
    pub fn cache(&self) -> Arc<DeviceBuffer> {
        self.cache.clone()
    }

    /// As [`Session::load`], with weights that are on the device already.
    pub fn load_sharing(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
    ) -> Result<Session, SessionError> {
        Session::load_over(device, queues, cubin, trace, steps_max, pack, None)
    }

    /// As [`Session::load_sharing`], over `cache` if it is given; on the device and those that run models together with it.
    ///
    /// # Errors
    /// Another number of devices than the kernel is for.
    pub(super) fn load_over(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<Session, SessionError> {
        let expected = queues.validated().schedule().machine.devices;
        if device.count() != expected || cache.as_ref().is_some_and(|cache| cache.devices() != expected) {
            return Err(SessionError::Devices { expected, found: device.count() });
        }
        let mut session = Session::load_first(device, queues, cubin, trace, steps_max, Arc::clone(&pack), cache)?;
        for (index, other) in (1..).zip(device.others()) {
            let (abort, bytes) = (session.kernel.watched.abort_word(), session.logits.bytes());
            session.peers.push(Peer::load(other, index, queues, cubin, bytes, Arc::clone(&pack), abort)?);
        }
        if expected > 1 {
            session.cache_map = CacheMap::of(queues.validated().schedule());
        }
        Ok(session)
    }

    fn load_first(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<Session, SessionError> {
        let kernel = Kernel::load(device, queues, cubin, trace, steps_max, pack)?;
        let (stream, schedule, tables) = (&kernel.watched.stream, &kernel.schedule, queues.tables());
        let mut exchange = device.alloc(tables.exchange_bytes.max(16))?;
        // Tag 0 is never published, so memory of zeros holds no packet.
        exchange.zero(stream)?;
        let cache = cache_or_own(cache, device, stream, tables.cache_bytes)?;
        let program = &schedule.program;
        let vocab = vocab(program);
        let logits = poisoned(device, stream, u64::from(steps_max) * u64::from(vocab) * 4)?;
        let has_state = Shape::of(program).is_none() && program.has_state();
        let best = first_buffer(program, Role::Best).expect("validate: a program without arg-max pairs has no select");
        let session = Session {
            mailbox: device.alloc_mapped(program.context_max as usize + 2)?,
            prompt: device.alloc(u64::from(program.context_max) * 4)?,
            staging: device.staging(TOKENS_BYTES)?,
            best_packet: schedule.placement[best.index()].unwrap_or(0) / 8,
            best_cols: program.buffers[best.index()].cols,
            pages: match Shape::of(program) {
                Some(shape) => Some(Pages::new(device, &shape)?),
                None => None,
            },
            given: GivenRows::of(device, stream, queues, steps_max)?,
            launched_from: 0,
            peers: vec![],
            cache_map: CacheMap::default(),
            meeting: Meeting::new(device)?,
            states: has_state.then_some(StateAt::Before(0)),
            device: has_state.then(|| device.clone()),
            snapshots: BTreeMap::new(),
            copied: None,
            cache,
            cache_bytes: tables.cache_bytes,
            exchange,
            logits,
            prompt_len: 0,
            eos: vec![],
            choosing: Choosing::of(&Sampler::greedy()),
            tag: 1,
            next: None,
            is_armed: false,
            steps_max,
            vocab,
            kernel,
        };
        session.kernel.watched.stream.synchronize()?;
        Ok(session)
    }

    /// Starts a sequence: tokens of the first positions, and the ids that end it.
    pub fn start(&mut self, prompt: &[u32], eos: &[u32]) -> Result<(), SessionError> {
        let context_max = self.kernel.schedule.program.context_max;
        if prompt.len() > context_max as usize {
            return Err(SessionError::Range { position: 0, steps: prompt.len() as u32, context_max });
        }
        if eos.len() > EOS_MAX {
            return Err(SessionError::EosCount { found: eos.len() });
        }
        // The kernel reads the row of the table that a token names: the proof has bounded those that it decides itself.
        if let Some(&token) = prompt.iter().find(|&&token| token >= self.vocab) {
            return Err(SessionError::Token { token, vocab: self.vocab });
        }
        self.set_prompt(0, prompt)?;
        self.prompt_len = prompt.len() as u32;
        self.eos = eos.to_vec();
        self.mailbox.store(0, 0)?;
        self.next = None;
        Ok(())
    }

    /// Tells every device the tokens from `position` on.
    fn set_prompt(&mut self, position: u32, tokens: &[u32]) -> Result<(), SessionError> {
        let at = u64::from(position) * 4;
        self.staging.queue(&self.kernel.watched.stream, &mut self.prompt, at, tokens)?;
        for peer in &mut self.peers {
            peer.prompt.upload(&peer.kernel.watched.stream, at, tokens)?;
        }
        Ok(())
    }

    /// Sets the token of `position`, where the next launch begins: another kernel over the same cache wrote the positions before it.
    pub fn go_on(&mut self, position: u32, token: u32) -> Result<(), SessionError> {
        self.go_on_with(position, &[token])
    }

    /// As [`Session::go_on`], with several tokens.
    fn go_on_with(&mut self, position: u32, tokens: &[u32]) -> Result<(), SessionError> {
        let (context_max, steps) = (self.kernel.schedule.program.context_max, tokens.len() as u32);
        if u64::from(position) + u64::from(steps) > u64::from(context_max) {
            return Err(SessionError::Range { position, steps, context_max });
        }
        if let Some(&token) = tokens.iter().find(|token| **token >= self.vocab) {
            return Err(SessionError::Token { token, vocab: self.vocab });
        }
        self.set_prompt(position, tokens)?;
        self.mailbox.store(0, 0)?;
        (self.prompt_len, self.next) = (position + steps, None);
        Ok(())
    }

    /// Sets the tokens of a draft from `position` on, where the next launch begins, and what it is given with each. The text is `ahead` positions
    /// ahead of the cache. A token that the launch before decided is known to the kernel.
    ///
    /// # Errors
    /// A kernel that is not that of a draft; rows of another width; tokens that do not fit.
    pub fn give(&mut self, position: u32, tokens: &[u32], rows: &[Arc<[f32]>], ahead: u32) -> Result<(), SessionError> {
        let given = self.given.as_mut().ok_or(SessionError::Given { expected: 0, found: rows.len() })?;
        given.give(position, rows, ahead)?;
        if let ([token], Some(decided)) = (tokens, self.decided_at(position)?)
            && *token == decided
        {
            return Ok(());
        }
        self.go_on_with(position, tokens)
    }

    /// Reads the tokens of a draft from `position` on, each with what it is given, and goes on with those that the kernel chooses: the token after the
    /// last one, and `further` ones. Where no token is chosen, no weights of the head are read. The logits are those of the launch that chooses.
    ///
    /// # Errors
    /// As [`Session::give`]; a launch that gave up.
    pub fn propose(
        &mut self,
        position: u32,
        tokens: &[u32],
        given: &GivenWith<'_>,
        further: u32,
        with_logits: bool,
    ) -> Result<Vec<u32>, SessionError> {
        let (count, end) = (tokens.len() as u32, position + tokens.len() as u32);
        if tokens.is_empty() || given.count() != tokens.len() {
            return Err(SessionError::Given { expected: count, found: given.count() });
        }
        self.go_on_with(position, tokens)?;
        let of = self.given.as_mut().ok_or(SessionError::Given { expected: 0, found: given.count() })?;
        let mut reading = None;
        let mut begins = position;
        if count > 1 && of.only_read() {
            given.give(of, position, 0..count as usize - 1)?;
            reading = Some(self.launch(position, count - 1, false)?);
            begins = end - 1;
        }
        let of = self.given.as_mut().ok_or(SessionError::Given { expected: 0, found: given.count() })?;
        given.give(of, begins, (begins - position) as usize..count as usize)?;
        let launched = self.launch(begins, end - begins + further, with_logits);
        // Both are waited for, also if one was refused or gave up.
        let read = reading.map(|timeout_ms| self.finish(timeout_ms)).transpose();
        let chosen = launched.and_then(|timeout_ms| self.finish(timeout_ms));
        read?;
        chosen?;
        (end..=end + further).map(|position| self.token(position)).collect()
    }

    /// Whether launches of [`Session::propose`] read the tokens before the last one without choosing any.
    pub fn only_reads(&self) -> bool {
        self.given.as_ref().is_some_and(GivenRows::can_only_read)
    }

    /// Lets the kernel of a draft go on with what its steps leave, by its own final norm, and read what the model left, by that of the model.
    ///
    /// # Errors
    /// A kernel that is not that of a draft; norms of another width; what the driver refuses.
    pub fn set_norms(&mut self, device: &Device, norms: &[LeftNorm; 2]) -> Result<(), SessionError> {
        let given = self.given.as_mut().ok_or(SessionError::Given { expected: 0, found: 0 })?;
        given.set_norms(device, &self.kernel.watched.stream, norms)
    }

    /// Whether steps that the host gives nothing go on with what the step before left.
    pub fn goes_on(&self) -> bool {
        self.given.as_ref().is_some_and(GivenRows::goes_on)
    }

    /// Whether [`Session::propose`] takes such rows.
    pub fn reads_left(&self, left: &Left) -> bool {
        self.given.as_ref().is_some_and(|given| given.reads(left))
    }

    /// What the last layer left in the last step, before the final norm, `[hidden]`. `None`: every SM has it for itself.
    pub fn left(&self) -> Result<Option<Vec<f32>>, SessionError> {
        let input = self.kernel.schedule.program.head_input();
        input.map(|input| self.exchanged(input, 0)).transpose()
    }

    /// Decodes `text` from position 0 on, as a prompt: all that a cache and recurrent states have of it. What ends a text stays as it is.
    ///
    /// # Errors
    /// What the device refuses; a launch that gave up.
    pub fn decode_again(&mut self, text: &[u32]) -> Result<(), SessionError> {
        let eos = std::mem::take(&mut self.eos);
        self.start(text, &[])?;
        let mut position = 0;
        while (position as usize) < text.len() {
            let steps = self.steps_max.min(text.len() as u32 - position);
            self.run(position, steps, false)?;
            position += steps;
        }
        self.eos = eos;
        Ok(())
    }

    /// Whether a step at `position` finds the recurrent states that it needs: those before it. Position 0 needs none.
    pub fn finds_state(&self, position: u32) -> bool {
        position == 0 || self.states.is_none_or(|states| states == StateAt::Before(position))
    }

    /// Tells that the recurrent states are those before `position`: others wrote them. A timer may say so of any states.
    pub fn state_is_before(&mut self, position: u32) {
        self.states = self.states.map(|_| StateAt::Before(position));
    }

    /// Keeps the recurrent state, which is that before some position, in a slot. The first use of a slot takes memory. No launch runs. Without such
    /// a state, or if it is not known, nothing is kept.
    ///
    /// # Errors
    /// Too little memory; what the driver refuses.
    pub fn keep_state(&mut self, slot: usize) -> Result<(), SessionError> {
        self.save_state(slot)?;
        self.await_copies()
    }

    /// As [`Session::keep_state`], and waits for nothing. What other kernels launch over the cache has to follow the event, if there is one.
    ///
    /// # Errors
    /// As [`Session::keep_state`].
    pub fn keep_state_soon(&mut self, slot: usize) -> Result<Option<&Event>, SessionError> {
        self.save_state(slot)?;
        self.copied()
    }

    fn save_state(&mut self, slot: usize) -> Result<(), SessionError> {
        let old = self.snapshots.remove(&slot);
        let (Some(StateAt::Before(position)), Some(device)) = (self.states, &self.device) else { return Ok(()) };
        let rows = StateRows::of(&self.kernel.schedule);
        let devices = iter::once(device).chain(device.others());
        let alloc = || devices.map(|device| device.alloc(rows.kept_bytes())).collect::<Result<Vec<_>, _>>();
        let memory = old.map_or_else(alloc, |old| Ok(old.memory))?;
        for ((device, stream), memory) in (0..).zip(self.streams()).zip(&memory) {
            rows.save(stream, self.cache.on(device), memory)?;
        }
        self.snapshots.insert(slot, Snapshot { memory, before: position });
        Ok(())
    }

    /// Another kernel over the same cache may be launched next, in a stream of its own.
    fn await_copies(&self) -> Result<(), SessionError> {
        Ok(self.streams().into_iter().try_for_each(Stream::synchronize)?)
    }

    /// The end of the copies that were queued. Those of several devices are waited for.
    fn copied(&mut self) -> Result<Option<&Event>, SessionError> {
        if !self.peers.is_empty() {
            self.await_copies()?;
            return Ok(None);
        }
        let Some(device) = &self.device else { return Ok(None) };
        if self.copied.is_none() {
            self.copied = Some(device.event()?);
        }
        if let Some(copied) = &self.copied {
            copied.record(&self.kernel.watched.stream)?;
        }
        Ok(self.copied.as_ref())
    }

    /// The position before which the state in a slot is; `None`: nothing was kept there.
    pub fn kept(&self, slot: usize) -> Option<u32> {
        self.snapshots.get(&slot).map(|snapshot| snapshot.before)
    }

    /// Puts a snapshot back: the recurrent state is that before the position where it was kept, which is returned.
    ///
    /// # Errors
    /// Nothing was kept there; what the driver refuses.
    pub fn go_back(&mut self, slot: usize) -> Result<u32, SessionError> {
        let before = self.restore_state(slot)?;
        self.await_copies()?;
        Ok(before)
    }

    /// As [`Session::go_back`], and waits for nothing. What other kernels launch over the cache has to follow the event, if there is one.
    ///
    /// # Errors
    /// As [`Session::go_back`].
    pub fn go_back_soon(&mut self, slot: usize) -> Result<(u32, Option<&Event>), SessionError> {
        let before = self.restore_state(slot)?;
        Ok((before, self.copied()?))
    }

    fn restore_state(&mut self, slot: usize) -> Result<u32, SessionError> {
        let Some(Snapshot { memory, before }) = self.snapshots.get(&slot) else {
            return Err(SessionError::NoSnapshot { slot });
        };
        self.states = Some(StateAt::Unknown);
        let rows = StateRows::of(&self.kernel.schedule);
        for ((device, stream), memory) in (0..).zip(self.streams()).zip(memory) {
            rows.restore(stream, self.cache.on(device), memory)?;
        }
        (self.states, self.next) = (Some(StateAt::Before(*before)), None);
        Ok(*before)
    }

    /// Sets how following launches choose tokens. Until this is called, greedily.
    pub fn sample(&mut self, sampler: Sampler) {
        self.choosing = Choosing::of(&sampler);
    }

    /// As [`Session::sample`] of temperature alone: what an [`inverse temperature`](Sampler::temperature_of_rows) and its seed choose.
    pub(super) fn sample_row(&mut self, inverse_temperature: f32, seed: u64) {
        self.choosing = Choosing { inverse_temperature, seed, ..Choosing::of(&Sampler::greedy()) };
    }

    /// Says where the pool has the sequence that the next launches go on with; `pages` has the page of each block.
    pub(super) fn place(&mut self, sequence: SequenceId, pages: Vec<u32>) -> Result<(), SessionError> {
        let others = self.peers.iter_mut().filter_map(|peer| peer.pages.as_mut());
        self.pages.iter_mut().chain(others).try_for_each(|placed| placed.place(sequence, &pages))?;
        Ok(())
    }

    /// Whether a launch of at most `steps_max` steps from `position` on goes on from the last one, which may still run.
    pub(super) fn goes_on_at(&self, position: u32) -> bool {
        self.next == Some(position) && position >= self.prompt_len && self.steps_max <= TAG_LAST - self.tag
    }

    /// Waits until the launch that is waited for next has decided `count` tokens, or has ended.
    pub(super) fn await_decided(&self, count: u32, timeout_ms: u64) -> Result<(), SessionError> {
        let timeout = Duration::from_millis(timeout_ms);
        self.kernel.watched.await_last_step(timeout, || Ok(self.mailbox.load(0)? >= count))
    }

    /// The stream of its launches, and how long they took.
    pub(super) fn watched(&self) -> &Watched {
        &self.kernel.watched
    }

    /// The token that the last launch decided for `position`, where a launch may continue.
    pub(super) fn decided_at(&self, position: u32) -> Result<Option<u32>, SessionError> {
        if self.next == Some(position) { self.token(position).map(Some) } else { Ok(None) }
    }

    /// Queues `steps` steps from `position` on and returns at once. The tokens appear in the mailbox while the launch runs.
    pub fn launch(&mut self, position: u32, steps: u32, with_logits: bool) -> Result<u64, SessionError> {
        let context_max = self.kernel.schedule.program.context_max;
        if steps == 0 || steps > self.steps_max || u64::from(position) + u64::from(steps) > u64::from(context_max) {
            return Err(SessionError::Range { position, steps, context_max });
        }
        if !self.finds_state(position) {
            return Err(SessionError::State { position });
        }
        if steps > TAG_LAST - self.tag {
            self.begin_tags_anew(position)?;
        }
        let Choosing { is_filtered, .. } = self.choosing;
        if self.next != Some(position) {
            if position >= self.prompt_len {
                return Err(SessionError::NotContinuing { expected: self.next.unwrap_or(0), found: position });
            }
            self.arm_best()?;
        } else if is_filtered && position >= self.prompt_len {
            // The logits that decided this position's token were those of the launch before, which has reported it.
            self.set_prompt(position, &[self.token(position)?])?;
            self.prompt_len = position + 1;
        }
        let timeout = timeout(steps);
        if let Some(given) = &mut self.given {
            given.upload(&self.kernel.watched.stream, position, steps)?;
        }
        let params = Params { position, steps, ..self.params(timeout, with_logits)? };
        let all = self.all_watched();
        let launched = all_or_none(&all, || {
            // The words of all devices are ready before any kernel starts.
            all.iter().try_for_each(|watched| watched.begin())?;
            self.queue(params, timeout)?;
            self.meet()?;
            all.iter().try_for_each(|watched| watched.end())
        });
        // Devices of a launch that was abandoned may have stored packets of its tags.
        self.tag += steps;
        (self.next, self.launched_from, self.is_armed) = (None, position, false);
        self.states = self.states.map(|_| StateAt::Unknown);
        launched?;
        self.next = Some(position + steps);
        Ok(timeout.as_millis() as u64)
    }

    /// What watches the kernel of each device.
    fn all_watched(&self) -> Vec<&Watched> {
        iter::once(&self.kernel.watched).chain(self.peers.iter().map(|peer| &peer.kernel.watched)).collect()
    }

    /// The stream of each device.
    pub(super) fn streams(&self) -> Vec<&Stream> {
        self.all_watched().into_iter().map(|watched| watched.stream.as_ref()).collect()
    }

    /// No kernel that is queued from now on starts on any device before those that were queued have ended on all.
    fn meet(&self) -> Result<(), SessionError> {
        if !self.peers.is_empty() {
            self.meeting.meet(&self.kernel.watched.stream, self.peer_streams())?;
        }
        Ok(())
    }

    fn peer_streams(&self) -> impl Iterator<Item = &Stream> + Clone {
        self.peers.iter().map(|peer| peer.kernel.watched.stream.as_ref())
    }

    /// Parameters of a launch that begins with the next tag; the caller fills in position and steps.
    fn params(&self, timeout: Duration, with_logits: bool) -> Result<Params, SessionError> {
        let Choosing { inverse_temperature, seed, top_k, top_p_q32, is_filtered } = self.choosing;
        Ok(Params {
            cache: self.cache.address(),
            exchange: self.exchange.address(),
            logits: if with_logits || is_filtered { self.logits.address() } else { 0 },
            prompt: self.prompt.address(),
            mailbox: self.mailbox.address(),
            seed,
            prompt_len: self.prompt_len,
            tag: self.tag,
            inverse_temperature,
            top_k,
            top_p_q32,
            ..self.kernel.params(timeout, &self.eos)?
        })
    }

    /// Queues the kernel of each device between the `begin` and the `end` of its [`Watched`](super::kernel::Watched).
    fn queue(&self, params: Params, timeout: Duration) -> Result<(), SessionError> {
        let watched = &self.kernel.watched;
        if self.peers.is_empty() {
            return match (&self.pages, &self.given) {
                (Some(pages), _) => watched.queue(&pages.params(params)),
                (None, Some(given)) => watched.queue(&given.params(params)),
                (None, None) => watched.queue(&params),
            };
        }
        let mut each = vec![params];
        for peer in &self.peers {
            each.push(peer.params(&params, &self.cache, timeout, &self.eos)?);
        }
        let pages = iter::once(&self.pages).chain(self.peers.iter().map(|peer| &peer.pages));
        let all = self.all_watched().into_iter().zip(pages).zip(&each).zip(distances(&each));
        for (((watched, pages), params), far) in all {
            let (peers, peer_logits) = (far.peers, far.peer_logits);
            match pages {
                Some(pages) => watched.queue(&PagedDevicesParams { params: pages.params(*params), peers, peer_logits }),
                None => watched.queue(&DevicesParams { params: *params, peers, peer_logits }),
            }?;
        }
        Ok(())
    }

    /// Queues `steps` steps from `position` on, whose token was [given](Session::go_on), as kernels of their own. Each leaves its logits, from
    /// which `choosing` chooses the token of the next step; without it the launch has one step, and ends with [`Session::choose`].
    pub(super) fn launch_each(
        &mut self,
        position: u32,
        steps: u32,
        mut choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<u64, SessionError> {
        let context_max = self.kernel.schedule.program.context_max;
        let fits = u64::from(position) + u64::from(steps) <= u64::from(context_max);
        if steps == 0 || steps > self.steps_max || !fits || position >= self.prompt_len {
            return Err(SessionError::Range { position, steps, context_max });
        }
        if steps > TAG_LAST - self.tag {
            self.begin_tags_anew(position)?;
        }
        self.arm_best()?;
        let (timeout, all) = (timeout(steps), self.all_watched());
        let token_at = |position: u32| self.prompt.address() + u64::from(position) * 4;
        let launched = all_or_none(&all, || {
            all.iter().try_for_each(|watched| watched.begin())?;
            for step in 0..steps {
                let (position, tag) = (position + step, self.tag + step);
                let params = self.params(timeout, true)?;
                // The token of each step is given: by the host, then by the sampler.
                self.queue(Params { position, steps: 1, tag, prompt_len: position + 1, ..params }, timeout)?;
                self.meet()?;
                let Some((sampler, asked)) = &mut choosing else { continue };
                if step == 0 {
                    // While the kernel runs.
                    sampler.upload(asked, steps)?;
                }
                let next = (step + 1 < steps).then(|| Next { token: token_at(position + 1), stride_bytes: 4 });
                sampler.queue(&self.kernel.watched, self.logits.address(), step, next)?;
                if step + 1 < steps {
                    self.tell_token(position + 1)?;
                }
            }
            all[1..].iter().try_for_each(|watched| watched.end())?;
            if choosing.is_some() { self.kernel.watched.end() } else { Ok(()) }
        });
        self.tag += steps;
        // What the head decided is not what the sampler chose.
        (self.next, self.is_armed) = (None, false);
        launched?;
        Ok(timeout.as_millis() as u64)
    }

    /// Gives the other devices the token of `position`, which the sampler has chosen on the first one when its stream comes there.
    fn tell_token(&self, position: u32) -> Result<(), SessionError> {
        if self.peers.is_empty() {
            return Ok(());
        }
        self.meeting.tell(&self.kernel.watched.stream, self.peer_streams())?;
        for peer in &self.peers {
            peer.prompt.copy_from_device(&peer.kernel.watched.stream, &self.prompt, u64::from(position) * 4, 4)?;
        }
        Ok(())
    }

    /// Queues the sampler after a launch of one step that waits for it.
    pub(super) fn choose(
        &mut self,
        is_unchosen: Option<&mut bool>,
        sampler: &mut SamplerSession,
        asked: &[Asked<'_>],
    ) -> Result<(), SessionError> {
        choose_now(is_unchosen, &self.kernel.watched, self.logits.address(), sampler, asked)
    }

    /// Waits for the running launch.
    pub fn finish(&mut self, timeout_ms: u64) -> Result<Launched, SessionError> {
        let timeout = Duration::from_millis(timeout_ms);
        let first = iter::once(self.kernel.finish(timeout));
        let finished = together(first.chain(self.peers.iter().map(|peer| peer.kernel.finish(timeout))));
        if let Err(SessionError::Hung { .. }) = finished {
            self.next = None;
        }
        let launched = Launched { device_us: finished?, decided: self.decided()? };
        // A step decides the token of its position and runs; after the last one another token is decided.
        let ran = launched.decided.saturating_sub(self.launched_from + 1);
        self.is_armed = self.next == Some(self.launched_from + ran);
        self.states = self.states.map(|_| StateAt::Before(self.launched_from + ran));
        Ok(launched)
    }

    /// Launches and waits.
    pub fn run(&mut self, position: u32, steps: u32, with_logits: bool) -> Result<Launched, SessionError> {
        let timeout_ms = self.launch(position, steps, with_logits)?;
        self.finish(timeout_ms)
    }

    /// Whether the running launch has ended, for any reason. Never waits.
    pub fn is_done(&self) -> Result<bool, SessionError> {
        Ok(self.kernel.watched.stream.is_done()?)
    }

    /// Positions whose token is known, while a launch runs or after it.
    pub fn decided(&self) -> Result<u32, SessionError> {
        Ok(self.mailbox.load(0)?)
    }

    /// The token of `position`, once it is decided.
    pub fn token(&self, position: u32) -> Result<u32, SessionError> {
        Ok(self.mailbox.load(1 + position as usize)?)
    }

    /// Logits of the first `steps` steps of the last launch that asked for them, `[steps * vocab]`.
    pub fn logits(&self, steps: u32) -> Result<Vec<f32>, SessionError> {
        Ok(self.logits.download(&self.kernel.watched.stream, 0, steps as usize * self.vocab as usize)?)
    }

    /// The values that the last step published into row `row` of an exchange buffer of packets and of one phase; NaN where it published
    /// nothing.
    pub fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        let stream = &self.kernel.watched.stream;
        let packets = |at, count| Ok(self.exchange.download(stream, at, count)?);
        self.kernel.exchanged(buffer, row, self.tag.wrapping_sub(1), packets)
    }

    /// Logits of one step of the last launch that asked for them, `[vocab]`.
    pub fn logits_of_step(&self, step: u32) -> Result<Vec<f32>, SessionError> {
        let at = u64::from(step.min(self.steps_max - 1)) * u64::from(self.vocab) * 4;
        Ok(self.logits.download(&self.kernel.watched.stream, at, self.vocab as usize)?)
    }

    /// 16-bit values of the cache arena, from byte `at` on.
    pub(crate) fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.cache_map.read(&self.cache, &self.streams(), at, bytes)?)
    }

    /// Logits of one row.
    pub(crate) fn vocab(&self) -> u32 {
        self.vocab
    }

    /// Fills the logits with a pattern that no kernel writes, so that an unwritten row shows.
    pub fn poison_logits(&mut self) -> Result<(), SessionError> {
        Ok(self.logits.poison(&self.kernel.watched.stream)?)
    }

    /// Launches a kernel that was compiled with time stamps, and waits.
    pub fn run_traced(&mut self, position: u32, steps: u32) -> Result<Stamped, SessionError> {
        self.kernel.clear_stamps()?;
        let launched = self.run(position, steps, false)?;
        self.kernel.stamped(steps, launched.device_us)
    }

    /// Bytes of the cache arena.
    pub fn cache_bytes(&self) -> u64 {
        self.cache_bytes
    }

    /// Writes bytes of the cache arena: a synthetic history for deep positions.
    pub fn upload_cache(&mut self, offset: u64, bytes: &[u8]) -> Result<(), SessionError> {
        let peers = self.peers.iter().map(|peer| peer.kernel.watched.stream.as_ref());
        let cache = Arc::get_mut(&mut self.cache).ok_or(SessionError::Shared)?;
        cache.upload(&self.kernel.watched.stream, offset, bytes)?;
        cache.others_mut().zip(peers).try_for_each(|(cache, stream)| cache.upload(stream, offset, bytes))?;
        Ok(())
    }

    /// Clears all packets before tags wrap around: a packet published 2^32 steps ago would pass for a current one. The token of
    /// `position`, which the launch before decided, is passed like a prompt.
    fn begin_tags_anew(&mut self, position: u32) -> Result<(), SessionError> {
        if self.next == Some(position) && position >= self.prompt_len {
            self.set_prompt(position, &[self.token(position)?])?;
            self.prompt_len = position + 1;
        }
        self.exchange.zero(&self.kernel.watched.stream)?;
        for peer in &mut self.peers {
            peer.exchange.zero(&peer.kernel.watched.stream)?;
            peer.kernel.watched.stream.synchronize()?;
        }
        if !self.peers.is_empty() {
            // The kernel of another device does not follow in this stream.
            self.kernel.watched.stream.synchronize()?;
        }
        (self.tag, self.next, self.is_armed) = (1, None, false);
        Ok(())
    }

    /// Acts as if `steps` more steps had run, so that a test can reach 2^32 steps without waiting for them.
    pub fn age(&mut self, steps: u32) {
        self.tag = self.tag.saturating_add(steps).min(TAG_LAST);
        (self.next, self.is_armed) = (None, false);
    }

    /// Publishes arg-max pairs in place of the step before a fresh start. They are not used, but readers wait for them all the same.
    fn arm_best(&mut self) -> Result<(), SessionError> {
        if self.is_armed {
            return Ok(());
        }
        let tag = self.tag - 1;
        if tag == 0 {
            // Memory of zeros has tag 0.
            self.tag += 1;
            return self.arm_best();
        }
        let words = vec![u64::from(tag) << 32; self.best_cols as usize];
        let phase = u64::from(tag & 1) * u64::from(self.best_cols.next_multiple_of(2));
        let at = (self.best_packet + phase) * 8;
        self.exchange.upload(&self.kernel.watched.stream, at, &words)?;
        for peer in &mut self.peers {
            peer.exchange.upload(&peer.kernel.watched.stream, at, &words)?;
        }
        Ok(())
    }
}
