//! Owns `RowsSession`: a batch kernel with its device memory, launched with tables that a guard has judged.

use super::driver::Device;
use super::given::{values_of_words, words_of};
pub use super::kernel::Watched;
use super::kernel::{Kernel, cache_or_own, vocab};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::peers::{CacheMap, Meeting, all_or_none, distances, together};
use super::rows_peers::RowsPeer;
use super::sampler::{Asked, Next, SamplerSession};
use super::session::{SessionError, Stamped};
use super::step_memory::StepMemory;
use super::stream::{Event, Stream};
use super::tables::{LaunchTables, Placed};
use crate::codegen::abi::{Params, Queues, Row, RowsDevicesParams, RowsParams};
use crate::codegen::emit::Trace;
use crate::ir::BufferId;
use crate::ir::layout::WORD_ROWS;
use crate::rows::{Run, Shape, Tables, runs};
use crate::speculate::Left;
use std::collections::VecDeque;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

/// What decides the tokens of one row of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowInput {
    pub first: FirstToken,
    /// Steps that the row takes part in; at most those of the launch.
    pub steps: u32,
    /// 0: greedy. Otherwise noise is added to each logit divided by the temperature.
    pub inverse_temperature: f32,
    pub seed: u64,
}

/// The token of a row in the first step of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstToken {
    Given(u32),
    /// What this row decided in the last step of the launch before.
    Decided(u32),
}

/// Runs launches of rows with tables that a guard has judged.
pub trait RowLauncher {
    /// What bounds the tables of a launch.
    fn shape(&self) -> &Shape;

    /// Logits of a row; every token is below.
    fn vocab(&self) -> u32;

    /// Steps of a launch, at most.
    fn steps_max(&self) -> u32;

    /// Whether rows at these positions are faster here than on a kernel for `others` rows without KV splits.
    fn gains(&self, _positions: &[u32], _others: u32) -> bool {
        false
    }

    /// Positions of the longest KV split; 0 if no history is cut.
    fn split_max(&self) -> u32 {
        0
    }

    /// The cache arena, to share with a kernel for other numbers of rows whose caches lie at the same places.
    fn cache(&self) -> Arc<DeviceBuffer>;

    /// The pack, to share with another kernel of the model.
    fn pack(&self) -> Arc<DeviceBuffer>;

    /// Queues a launch and returns at once. Positions are marked as written when queued, not when finished: every row takes part in every
    /// step, and the device runs later launches after this one. [`RowLauncher::finish`] waits for it. Before that, one more launch can be
    /// queued if [`RowLauncher::last_step`] said so: all of its rows continue with what rows of this one decide.
    ///
    /// # Errors
    /// Inputs that do not fit the tables, or that end before the last step; a launch that was not finished.
    fn queue(&mut self, tables: Tables<'_>, inputs: &[RowInput], with_logits: bool) -> Result<(), SessionError>;

    /// As [`RowLauncher::queue`], with the logits of every row, from which `sampler` chooses the tokens of the rows that are `asked`: all
    /// rows, if the launch has several steps. Each step is a kernel of its own, the sampler runs between two of them, and the
    /// host waits for nothing before the end. [`SamplerSession::answer`] has the tokens after [`RowLauncher::finish`].
    ///
    /// # Errors
    /// As [`RowLauncher::queue`]; tokens that are not given; rows of several steps that are not asked for.
    fn queue_sampled(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        sampler: &mut SamplerSession,
        asked: &[Asked<'_>],
    ) -> Result<(), SessionError> {
        let steps = tables.steps();
        if steps > 1 && !(0..inputs.len() as u32).all(|row| asked.iter().any(|asked| asked.row == row)) {
            return Err(out_of_range(&tables));
        }
        all_given(&tables, inputs)?;
        self.queue_steps(tables, inputs, Some((sampler, asked)))
    }

    /// As [`RowLauncher::queue_sampled`], of one step whose tokens [`RowLauncher::choose`] has chosen before it is waited for.
    ///
    /// # Errors
    /// As [`RowLauncher::queue_sampled`]; several steps.
    fn queue_unchosen(&mut self, tables: Tables<'_>, inputs: &[RowInput]) -> Result<(), SessionError> {
        if tables.steps() > 1 {
            return Err(out_of_range(&tables));
        }
        all_given(&tables, inputs)?;
        self.queue_steps(tables, inputs, None)
    }

    /// What [`RowLauncher::queue_sampled`] and, without a sampler, [`RowLauncher::queue_unchosen`] queue, after they judged the inputs.
    ///
    /// # Errors
    /// As theirs.
    fn queue_steps(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<(), SessionError>;

    /// Queues the sampler after the launch of [`RowLauncher::queue_unchosen`], which may still run.
    ///
    /// # Errors
    /// No such launch; what the driver refuses.
    fn choose(&mut self, sampler: &mut SamplerSession, asked: &[Asked<'_>]) -> Result<(), SessionError>;

    /// Waits until the only queued launch has begun its last step, or has ended. Then a launch that goes on from it can be queued. The
    /// tokens of each row that it has decided so far: all but the last one. `None`: no launch can go on from it before it was waited for.
    ///
    /// # Errors
    /// No launch is queued; what the driver refuses.
    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, SessionError>;

    /// The stream of its launches, and how long they took.
    fn watched(&self) -> &Watched;

    /// The streams of its launches, one of each device.
    fn streams(&self) -> Vec<&Stream> {
        vec![&self.watched().stream]
    }

    /// The end of the launch that was queued last.
    fn last_end(&self) -> Option<&Event> {
        self.watched().last_end()
    }

    /// Lets the launches that follow wait for the end of a launch of another kernel, which may still run. They see what it wrote.
    ///
    /// # Errors
    /// What the driver refuses.
    fn follow(&mut self, end: &Event) -> Result<(), SessionError> {
        Ok(self.streams().into_iter().try_for_each(|stream| stream.follow(end))?)
    }

    /// Waits for the oldest queued launch.
    ///
    /// # Errors
    /// No launch is queued, or it gave up.
    fn finish(&mut self) -> Result<RowsLaunched, SessionError>;

    /// Queues a launch and waits for it.
    ///
    /// # Errors
    /// As [`RowLauncher::queue`] and [`RowLauncher::finish`].
    fn run_whole(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        with_logits: bool,
    ) -> Result<RowsLaunched, SessionError> {
        self.queue(tables, inputs, with_logits)?;
        self.finish()
    }

    /// How long the device was idle before the launch that was waited for last, in microseconds.
    ///
    /// # Errors
    /// Fewer than two launches; what the driver refuses.
    fn gap_us(&self) -> Result<f64, SessionError> {
        self.watched().gap_us()
    }

    /// Logits of a row in the last step of the last launch that asked for them.
    ///
    /// # Errors
    /// What the driver refuses; a launch that was not finished.
    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError>;

    /// The values that row `row` of the last launch published in its last step into an exchange buffer of packets; NaN where it published
    /// nothing. Nothing at all of a kernel without such a buffer. Of a wave kernel, what it chose.
    ///
    /// # Errors
    /// What the driver refuses; a launch that was not finished.
    fn exchanged(&self, _buffer: BufferId, _row: u32) -> Result<Vec<f32>, SessionError> {
        Ok(vec![])
    }

    /// Whether [`RowLauncher::left`] tells what rows left.
    fn keeps_left(&self) -> bool {
        false
    }

    /// What the last layer left of the first `rows` rows in the last step of the last launch, before the final norm, `[hidden]` each. All of these
    /// rows took part in it, and in a whole step.
    ///
    /// # Errors
    /// A kernel that does not keep it; what the driver refuses; a launch that was not finished.
    fn left(&self, _rows: usize) -> Result<Vec<Vec<f32>>, SessionError> {
        Err(SessionError::NothingLeft { row: 0 })
    }

    /// Where [`RowLauncher::left`] is on the device; `None`: on several devices, or nowhere.
    ///
    /// # Errors
    /// A launch that was not finished.
    fn left_in_place(&self, _rows: usize) -> Result<Option<Left>, SessionError> {
        Ok(None)
    }

    /// Rows of a launch, from its first one on, of which [`RowLauncher::exchanged`] tells. A launch of more rows leaves others there.
    fn rows_kept(&self) -> u32 {
        self.shape().rows
    }

    /// Fills the logits with a pattern that no kernel writes, so that an unwritten row shows; of a wave kernel what rows chose, too.
    ///
    /// # Errors
    /// What the driver refuses.
    fn poison_logits(&mut self) -> Result<(), SessionError>;

    /// 16-bit values of the cache arena, from byte `at` on.
    ///
    /// # Errors
    /// What the driver refuses.
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError>;
}

/// What a launch left.
#[derive(Debug, Clone, PartialEq)]
pub struct RowsLaunched {
    /// Device time between the events around the launch.
    pub device_us: f64,
    /// Steps that ran: their positions are written.
    pub steps: u32,
    /// The token of each row, for each step that ran and for the step after the last one. Empty if no row wanted logits, or a sampler
    /// chose.
    pub tokens: Vec<Vec<u32>>,
}

/// A launch that is queued or runs.
struct Flying {
    inputs: Vec<RowInput>,
    eos: Vec<u32>,
    steps: u32,
    /// The launch has one step, which ends when the cache has its rows: nothing is decided.
    only_fills: bool,
    /// The sampler is not queued yet.
    is_unchosen: bool,
    /// Which mailbox has its tokens. `None`: each step was a kernel of its own, and a sampler chose the tokens after it.
    mailbox: Option<usize>,
    timeout: Duration,
}

impl Flying {
    /// A launch may go on from it before it was waited for: each row decides a token in the last step.
    fn goes_on(&self) -> bool {
        !self.only_fills
            && self.mailbox.is_some()
            && self.eos.is_empty()
            && self.inputs.iter().all(|i| i.steps >= self.steps)
    }
}

/// What the parameters of a launch say of its rows.
struct OfLaunch {
    only_fills: bool,
    row_count: u32,
    logits_from: u32,
    timeout: Duration,
}

/// A batch kernel on a device, and on those that run steps together with it.
pub struct RowsSession {
    kernel: Kernel,
    shape: Shape,
    cache: Arc<DeviceBuffer>,
    memory: StepMemory,
    tables: LaunchTables,
    /// Those of two launches, used in turn.
    mailboxes: [MappedBuffer; 2],
    next_mailbox: usize,
    /// Rows of a step, as the kernel lays them out.
    padded: u32,
    /// Tag of the first step of the next launch.
    tag: u32,
    /// For each row, whether the exchange holds what it decided in the last step, once the queued launches have ended.
    decided: Vec<bool>,
    /// The last launch only filled the cache.
    filled: bool,
    /// Oldest first.
    flying: VecDeque<Flying>,
    steps_max: u32,
    vocab: u32,
    /// The other devices, and which has which part of the cache.
    peers: Vec<RowsPeer>,
    cache_map: CacheMap,
    meeting: Meeting,
}

impl RowsSession {
    /// Loads the queues of a proven schedule. `pack` and, if it is given, `cache` are shared with other kernels of the model. A launch
    /// has at most `steps_max` steps, and the logits of its last one can be read. `trace` is what the cubin was compiled with.
    ///
    /// # Errors
    /// What the driver refuses; a schedule without tables.
    pub fn load(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<RowsSession, SessionError> {
        let expected = queues.validated().schedule().machine.devices;
        if device.count() != expected || cache.as_ref().is_some_and(|cache| cache.devices() != expected) {
            return Err(SessionError::Devices { expected, found: device.count() });
        }
        let mut kernel = Kernel::load(device, queues, cubin, trace, steps_max, pack)?;
        let (stream, program, tables) = (&kernel.watched.stream, &kernel.schedule.program, queues.tables());
        let shape = Shape::of(program).expect("validate: a batch kernel has tables");
        let padded = shape.rows.next_multiple_of(WORD_ROWS);
        let cache = cache_or_own(cache, device, stream, tables.cache_bytes)?;
        let vocab = vocab(program);
        let logits = u64::from(padded) * u64::from(vocab);
        let memory = StepMemory::alloc(device, stream, tables.exchange_bytes, logits)?;
        kernel.watched.shape.kept = memory.kept();
        let mailbox = || device.alloc_mapped((steps_max as usize + 1) * padded as usize + 1);
        // A table for each step that is a kernel of its own.
        let rows = u64::from(steps_max.max(1)) * u64::from(padded);
        let of_tables = (rows, u64::from(padded) * u64::from(shape.blocks()));
        let mut peers = vec![];
        for (index, other) in (1..).zip(device.others()) {
            let (abort, pack) = (kernel.watched.abort_word(), kernel.pack.clone());
            peers.push(RowsPeer::load(other, index, queues, cubin, pack, abort, logits, of_tables)?);
        }
        let mut session = RowsSession {
            mailboxes: [mailbox()?, mailbox()?],
            next_mailbox: 0,
            tables: LaunchTables::new(device, 0, of_tables.0, of_tables.1)?,
            cache_map: if peers.is_empty() { CacheMap::default() } else { CacheMap::of(&kernel.schedule) },
            meeting: Meeting::new(device)?,
            peers,
            kernel,
            shape,
            cache,
            memory,
            padded,
            tag: 0,
            decided: vec![],
            filled: false,
            flying: VecDeque::new(),
            steps_max,
            vocab,
        };
        session.begin_words()?;
        session.kernel.watched.stream.synchronize()?;
        Ok(session)
    }

    /// Makes every word of the exchange one that is not there yet. Packets of a tag that was never used are not there either.
    fn begin_words(&mut self) -> Result<(), SessionError> {
        self.memory.poison_exchange(&self.kernel.watched.stream)?;
        for peer in &mut self.peers {
            peer.memory.poison_exchange(&peer.kernel.watched.stream)?;
        }
        if !self.peers.is_empty() {
            // A kernel of another device does not follow in this stream.
            self.streams().into_iter().try_for_each(Stream::synchronize)?;
        }
        self.tag = 2;
        self.decided.clear();
        self.filled = false;
        Ok(())
    }

    /// Runs a launch and waits. `inputs` has one for each row of `tables`. A row that decides one of `eos` takes no part in later steps.
    ///
    /// # Errors
    /// Inputs that do not fit the tables; a launch that gave up. After one that gave up the positions of its rows are not written.
    pub fn run(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        eos: &[u32],
        with_logits: bool,
    ) -> Result<RowsLaunched, SessionError> {
        self.launch(&tables, inputs, eos, with_logits)?;
        let launched = self.finish()?;
        tables.finish(launched.steps);
        Ok(launched)
    }

    /// As [`RowsSession::run`], of a kernel that was compiled with time stamps.
    ///
    /// # Errors
    /// As [`RowsSession::run`].
    pub fn run_traced(&mut self, tables: Tables<'_>, inputs: &[RowInput]) -> Result<Stamped, SessionError> {
        self.kernel.clear_stamps()?;
        let steps = tables.steps();
        let launched = self.run(tables, inputs, &[], false)?;
        self.kernel.stamped(steps, launched.device_us)
    }

    fn launch(
        &mut self,
        tables: &Tables<'_>,
        inputs: &[RowInput],
        eos: &[u32],
        with_logits: bool,
    ) -> Result<(), SessionError> {
        let steps = tables.steps();
        let only_fills = self.begin_launch(tables, inputs, with_logits)?;
        let (rows, pages) = encode_rows(tables, inputs, &self.decided, self.vocab)?;
        let timeout = timeout(steps);
        let placed = self.upload(&rows, &pages)?;
        let mailbox = self.begin_mailbox()?;
        let address = self.mailboxes[mailbox].address();
        let params = Params { steps, tag: self.tag, mailbox: address, ..self.params(timeout, eos, with_logits)? };
        let of = OfLaunch { only_fills, row_count: inputs.len() as u32, logits_from: steps - 1, timeout };
        let all = self.all_watched();
        let launched = all_or_none(&all, || {
            // The words of all devices are ready before any kernel starts.
            all.iter().try_for_each(|watched| watched.begin())?;
            self.queue_kernels(params, &placed, &of, eos)?;
            all.iter().try_for_each(|watched| watched.end())
        });
        self.begin_anew_after(launched)?;
        let (inputs, eos) = (inputs.to_vec(), eos.to_vec());
        let mailbox = Some(mailbox);
        self.flies(Flying { inputs, eos, steps, only_fills, is_unchosen: false, mailbox, timeout });
        Ok(())
    }

    /// Uploads the tables of a launch to each device. Where no other one runs, the host waits for nothing.
    fn upload(&mut self, rows: &[Row], pages: &[u32]) -> Result<Vec<Placed>, SessionError> {
        if self.flying.is_empty() && self.peers.is_empty() {
            return Ok(vec![self.tables.queue(&self.kernel.watched.stream, rows, pages)?]);
        }
        let mut placed = vec![self.tables.upload(rows, pages)?];
        for peer in &mut self.peers {
            placed.push(peer.tables.upload(rows, pages)?);
        }
        Ok(placed)
    }

    /// After a launch that was abandoned, words of some of its rows may be there.
    fn begin_anew_after(&mut self, launched: Result<(), SessionError>) -> Result<(), SessionError> {
        if launched.is_err() && self.flying.is_empty() {
            // The launch has an error to tell, which explains that of the driver here.
            drop(self.begin_words());
        }
        launched
    }

    /// What watches the kernel of each device.
    fn all_watched(&self) -> Vec<&Watched> {
        iter::once(&self.kernel.watched).chain(self.peers.iter().map(|peer| &peer.kernel.watched)).collect()
    }

    fn peer_streams(&self) -> impl Iterator<Item = &Stream> + Clone {
        self.peers.iter().map(|peer| peer.kernel.watched.stream.as_ref())
    }

    /// Queues the kernel of each device, and lets no later one start before all have ended.
    fn queue_kernels(&self, params: Params, placed: &[Placed], of: &OfLaunch, eos: &[u32]) -> Result<(), SessionError> {
        let with_rows = |kernel: &Kernel, params: Params, placed: &Placed| RowsParams {
            params,
            rows: placed.rows,
            pages: placed.pages,
            fills: if of.only_fills { kernel.fills() } else { 0 },
            row_count: of.row_count,
            logits_from: of.logits_from,
        };
        if self.peers.is_empty() {
            return self.kernel.watched.queue(&with_rows(&self.kernel, params, &placed[0]));
        }
        let mut each = vec![params];
        for peer in &self.peers {
            each.push(peer.params(&params, &self.cache, of.timeout, eos)?);
        }
        let kernels = iter::once(&self.kernel).chain(self.peers.iter().map(|peer| &peer.kernel));
        for (((kernel, params), placed), far) in kernels.zip(&each).zip(placed).zip(distances(&each)) {
            let params = with_rows(kernel, *params, placed);
            kernel.watched.queue(&RowsDevicesParams { params, peers: far.peers, peer_logits: far.peer_logits })?;
        }
        Ok(self.meeting.meet(&self.kernel.watched.stream, self.peer_streams())?)
    }

    /// The mailbox of the next launch, without tokens.
    fn begin_mailbox(&mut self) -> Result<usize, SessionError> {
        let mailbox = self.next_mailbox;
        self.next_mailbox = 1 - mailbox;
        self.mailboxes[mailbox].store(0, 0)?;
        Ok(mailbox)
    }

    /// Notes what the next launch will find of one that was queued.
    fn flies(&mut self, flying: Flying) {
        self.tag += flying.steps;
        self.filled |= flying.only_fills;
        // A launch cannot go on with what the head alone decided.
        let decides = !flying.only_fills && flying.mailbox.is_some();
        let decided = flying.inputs.iter().filter(|_| decides).map(|input| input.steps >= flying.steps);
        self.decided = decided.collect();
        self.flying.push_back(flying);
    }

    /// What every launch passes; the caller fills in the rest.
    fn params(&self, timeout: Duration, eos: &[u32], with_logits: bool) -> Result<Params, SessionError> {
        Ok(Params {
            cache: self.cache.address(),
            exchange: self.memory.exchange(),
            logits: if with_logits { self.memory.logits() } else { 0 },
            ..self.kernel.params(timeout, eos)?
        })
    }

    /// Judges the inputs of a launch, and clears words that it must not find. Whether it only fills the cache.
    fn begin_launch(
        &mut self,
        tables: &Tables<'_>,
        inputs: &[RowInput],
        with_logits: bool,
    ) -> Result<bool, SessionError> {
        let steps = tables.steps();
        let only_fills = only_fills(tables, inputs, with_logits)?;
        may_queue(self.flying.iter().map(Flying::goes_on), inputs, with_logits)?;
        if !fits(&self.shape, tables, inputs.len()) || steps > self.steps_max {
            return Err(out_of_range(tables));
        }
        // Tags never repeat: a packet of 2^32 steps ago would pass for a current one. And tasks that a launch leaves out, because it
        // only fills the cache, have not cleared their words.
        if self.tags_end(steps) || self.filled && !only_fills {
            if !self.flying.is_empty() {
                return Err(SessionError::NotFinished);
            }
            self.begin_words()?;
        }
        Ok(only_fills)
    }

    /// Whether a launch of `steps` steps begins the tags anew.
    fn tags_end(&self, steps: u32) -> bool {
        self.tag > u32::MAX - steps - 2
    }
}

impl RowLauncher for RowsSession {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn steps_max(&self) -> u32 {
        self.steps_max
    }

    fn cache(&self) -> Arc<DeviceBuffer> {
        self.cache.clone()
    }

    fn pack(&self) -> Arc<DeviceBuffer> {
        self.kernel.pack.clone()
    }

    fn queue(&mut self, tables: Tables<'_>, inputs: &[RowInput], with_logits: bool) -> Result<(), SessionError> {
        let steps = tables.steps();
        if inputs.iter().any(|input| input.steps < steps) {
            return Err(out_of_range(&tables));
        }
        self.launch(&tables, inputs, &[], with_logits)?;
        tables.finish(steps);
        Ok(())
    }

    fn queue_steps(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<(), SessionError> {
        let steps = tables.steps();
        self.begin_launch(&tables, inputs, true)?;
        let (rows, pages) = encode_rows(&tables, inputs, &[], self.vocab)?;
        let placed = self.upload(&rows_of_steps(&rows, steps), &pages)?;
        let timeout = timeout(steps);
        let (all, logits) = (self.all_watched(), self.memory.logits());
        let of_steps = Steps { rows: placed[0].rows, row_count: rows.len(), steps };
        let is_unchosen = choosing.is_none();
        let of = OfLaunch { only_fills: false, row_count: inputs.len() as u32, logits_from: 0, timeout };
        let launched = all_or_none(&all, || {
            all[1..].iter().try_for_each(|watched| watched.begin())?;
            queue_each(all[0], of_steps, logits, choosing, |step, _| {
                let first = step as usize * rows.len();
                if step > 0 {
                    let own: (&Stream, _) = (&self.kernel.watched.stream, &self.tables);
                    let peers = self.peers.iter().map(RowsPeer::tables);
                    self.meeting.tell_rows(own, peers, first, rows.len())?;
                }
                // Without a mailbox: the sampler has the tokens.
                let params = Params { steps: 1, tag: self.tag + step, ..self.params(timeout, &[], true)? };
                let placed: Vec<Placed> = placed.iter().map(|placed| placed.after_rows(first)).collect();
                self.queue_kernels(params, &placed, &of, &[])
            })?;
            all[1..].iter().try_for_each(|watched| watched.end())
        });
        self.begin_anew_after(launched)?;
        let (inputs, eos) = (inputs.to_vec(), vec![]);
        self.flies(Flying { inputs, eos, steps, only_fills: false, is_unchosen, mailbox: None, timeout });
        tables.finish(steps);
        Ok(())
    }

    fn choose(&mut self, sampler: &mut SamplerSession, asked: &[Asked<'_>]) -> Result<(), SessionError> {
        let is_unchosen = self.flying.front_mut().map(|flying| &mut flying.is_unchosen);
        choose_now(is_unchosen, &self.kernel.watched, self.memory.logits(), sampler, asked)
    }

    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, SessionError> {
        let flying = self.flying.front().ok_or(SessionError::NotQueued)?;
        let goes_on = self.flying.len() == 1 && flying.goes_on() && !self.tags_end(self.steps_max);
        let Some(mailbox) = flying.mailbox.filter(|_| goes_on) else { return Ok(None) };
        let (steps, mailbox) = (flying.steps, &self.mailboxes[mailbox]);
        self.kernel.watched.await_last_step(flying.timeout, || Ok(mailbox.load(0)? >= steps))?;
        let token = |step: u32, row: usize| mailbox.load(1 + (step * self.padded) as usize + row);
        let of_row = |row| (1..steps).map(|step| token(step, row)).collect::<Result<Vec<u32>, _>>();
        Ok(Some((0..flying.inputs.len()).map(of_row).collect::<Result<_, _>>()?))
    }

    fn finish(&mut self) -> Result<RowsLaunched, SessionError> {
        let Some(Flying { inputs, eos, steps, only_fills, is_unchosen, mailbox, timeout }) = self.flying.pop_front()
        else {
            return Err(SessionError::NotQueued);
        };
        if is_unchosen {
            return Err(SessionError::NotChosen);
        }
        let first = iter::once(self.kernel.finish(timeout));
        let finished = together(first.chain(self.peers.iter().map(|peer| peer.kernel.finish(timeout))));
        if let Err(SessionError::Hung { .. }) = finished {
            self.begin_words()?;
        }
        let device_us = finished?;
        let Some(mailbox) = mailbox else { return Ok(RowsLaunched { device_us, steps, tokens: vec![] }) };
        let mailbox = &self.mailboxes[mailbox];
        let reported = mailbox.load(0)?;
        if only_fills {
            return Ok(RowsLaunched { device_us, steps: reported, tokens: vec![] });
        }
        let token = |step: u32, row: usize| mailbox.load(1 + (step * self.padded) as usize + row);
        let tokens: Vec<Vec<u32>> = (0..reported)
            .map(|step| (0..inputs.len()).map(|row| token(step, row)).collect())
            .collect::<Result<_, _>>()?;
        if !eos.is_empty() {
            self.decided = took_part_last(&inputs, &tokens, steps, &eos);
        }
        // Fewer steps: words of the last phase would be cleared in the wrong step.
        if reported != steps + 1 {
            self.begin_words()?;
        }
        Ok(RowsLaunched { device_us, steps: reported.saturating_sub(1), tokens })
    }

    fn watched(&self) -> &Watched {
        &self.kernel.watched
    }

    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        let first = u64::from(row.min(self.padded - 1)) * u64::from(self.vocab);
        Ok(self.memory.read_logits(&self.kernel.watched.stream, first, self.vocab as usize)?)
    }

    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        let stream = &self.kernel.watched.stream;
        let packets = |at, count| Ok(self.memory.read_packets(stream, at, count)?);
        self.kernel.exchanged(buffer, row, self.tag.wrapping_sub(1), packets)
    }

    fn keeps_left(&self) -> bool {
        let input = self.kernel.schedule.program.head_input();
        input.is_some_and(|input| words_of(&self.kernel.schedule, input, 1, 0).is_some())
    }

    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        let program = &self.kernel.schedule.program;
        let none = SessionError::NothingLeft { row: rows as u32 };
        let Some(input) = program.head_input() else { return Err(none) };
        let found = words_of(&self.kernel.schedule, input, rows, self.tag.wrapping_sub(1));
        let Some((at, bytes)) = found else { return Err(none) };
        let words = self.memory.read_words(&self.kernel.watched.stream, at, bytes as usize / 4)?;
        let of = &program.buffers[input.index()];
        values_of_words(&words, rows, of.cols as usize, of.dtype.bytes())
    }

    fn left_in_place(&self, rows: usize) -> Result<Option<Left>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        let program = &self.kernel.schedule.program;
        let Some(input) = program.head_input().filter(|_| self.peers.is_empty()) else { return Ok(None) };
        let found = words_of(&self.kernel.schedule, input, rows, self.tag.wrapping_sub(1));
        let of = &program.buffers[input.index()];
        Ok(found.map(|(at, _)| Left {
            address: self.memory.exchange() + at,
            first: 0,
            count: rows as u32,
            cols: of.cols,
            value_bytes: of.dtype.bytes(),
        }))
    }

    fn poison_logits(&mut self) -> Result<(), SessionError> {
        Ok(self.memory.poison_logits(&self.kernel.watched.stream)?)
    }

    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.cache_map.read(&self.cache, &self.streams(), at, bytes)?)
    }

    fn streams(&self) -> Vec<&Stream> {
        self.all_watched().into_iter().map(|watched| watched.stream.as_ref()).collect()
    }
}

/// Whether tables are those of a kernel of this shape, with as many inputs. The guard may be that of a kernel for other numbers of
/// rows over the same cache.
pub(super) fn fits(shape: &Shape, tables: &Tables<'_>, inputs: usize) -> bool {
    let rows = tables.rows().len();
    Shape { rows: shape.rows, ..*tables.shape() } == *shape && rows <= shape.rows as usize && rows == inputs
}

/// Judges a launch beside those that fly; each tells whether one may go on from it. Kernels share memory for tokens and logits of a launch
/// that was not waited for, so only rows that go on with what its rows decide may follow it.
///
/// # Errors
/// A launch that was not waited for, and that this one does not go on from.
pub(super) fn may_queue(
    mut flying: impl ExactSizeIterator<Item = bool>,
    inputs: &[RowInput],
    with_logits: bool,
) -> Result<(), SessionError> {
    let goes_on = || !with_logits && inputs.iter().all(|input| matches!(input.first, FirstToken::Decided(_)));
    match flying.len() {
        0 => Ok(()),
        1 if goes_on() && flying.all(|goes_on| goes_on) => Ok(()),
        _ => Err(SessionError::NotFinished),
    }
}

/// Refuses tokens that another launch decides, and rows that end before the last step.
fn all_given(tables: &Tables<'_>, inputs: &[RowInput]) -> Result<(), SessionError> {
    let is_given = |input: &RowInput| matches!(input.first, FirstToken::Given(_)) && input.steps >= tables.steps();
    if inputs.iter().all(is_given) { Ok(()) } else { Err(out_of_range(tables)) }
}

/// Rows that take part in one step, with these tokens.
pub fn given(tokens: &[u32]) -> Vec<RowInput> {
    let input = |&token| RowInput { first: FirstToken::Given(token), steps: 1, inverse_temperature: 0.0, seed: 0 };
    tokens.iter().map(input).collect()
}

/// The largest position of tables that do not fit a kernel.
pub(super) fn out_of_range(tables: &Tables<'_>) -> SessionError {
    let position = tables.rows().iter().map(|row| row.position).max().unwrap_or(0);
    SessionError::Range { position, steps: tables.steps(), context_max: tables.shape().context_max }
}

/// The tables of launches of one step each, of which `steps` go through the positions of `rows`; side by side.
pub(super) fn rows_of_steps(rows: &[Row], steps: u32) -> Vec<Row> {
    let of_step = |step: u32| rows.iter().map(move |row| Row { position: row.position + step, steps: 1, ..*row });
    (0..steps).flat_map(of_step).collect()
}

/// Tables of [`rows_of_steps`] on a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    pub rows: u64,
    pub row_count: usize,
    pub steps: u32,
}

impl Steps {
    fn table(&self, step: u32) -> u64 {
        self.rows + u64::from(step) * (self.row_count * size_of::<Row>()) as u64
    }

    /// Where the sampler writes the tokens of the step after `step`.
    fn next(&self, step: u32) -> Option<Next> {
        let token = self.table(step + 1) + std::mem::offset_of!(Row, token) as u64;
        (step + 1 < self.steps).then_some(Next { token, stride_bytes: size_of::<Row>() as u32 })
    }
}

/// Queues each step as a kernel of its own, and the sampler after it. `queue` queues a kernel; it is told the step and its table. A launch
/// without a sampler ends when [`choose_now`] has queued one.
///
/// # Errors
/// What the driver refuses.
pub(super) fn queue_each(
    watched: &Watched,
    tables: Steps,
    logits: u64,
    mut choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    mut queue: impl FnMut(u32, u64) -> Result<(), SessionError>,
) -> Result<(), SessionError> {
    watched.begin()?;
    for step in 0..tables.steps {
        queue(step, tables.table(step))?;
        let Some((sampler, asked)) = &mut choosing else { continue };
        if step == 0 {
            // While the kernel runs.
            sampler.upload(asked, tables.steps)?;
        }
        sampler.queue(watched, logits, step, tables.next(step))?;
    }
    if choosing.is_some() {
        watched.end()?;
    }
    Ok(())
}

/// Queues the sampler after a launch of one step that waits for it.
///
/// # Errors
/// No such launch; what the driver refuses.
pub(super) fn choose_now(
    is_unchosen: Option<&mut bool>,
    watched: &Watched,
    logits: u64,
    sampler: &mut SamplerSession,
    asked: &[Asked<'_>],
) -> Result<(), SessionError> {
    let Some(is_unchosen) = is_unchosen.filter(|is_unchosen| **is_unchosen) else {
        return Err(SessionError::NotQueued);
    };
    sampler.upload(asked, 1)?;
    sampler.queue(watched, logits, 0, None)?;
    watched.end()?;
    *is_unchosen = false;
    Ok(())
}

/// The deadline of a launch.
pub(super) fn timeout(steps: u32) -> Duration {
    Duration::from_millis(1000 + 20 * u64::from(steps))
}

/// The rows of a launch as the kernel reads them, and the page table of their sequences: a row of it for each run of rows.
pub(super) fn encode_rows(
    tables: &Tables<'_>,
    inputs: &[RowInput],
    decided: &[bool],
    vocab: u32,
) -> Result<(Vec<Row>, Vec<u32>), SessionError> {
    let (mut rows, mut pages) = (vec![], vec![]);
    for (sequence, Run { first, rows: count, .. }) in (0..).zip(runs(tables.rows())) {
        pages.extend(tables.pages(first));
        for (row, input) in tables.rows().iter().zip(inputs).skip(first).take(count as usize) {
            let (token, from) = match input.first {
                FirstToken::Given(token) if token >= vocab => return Err(SessionError::Token { token, vocab }),
                FirstToken::Given(token) => (token as i32, 0),
                // The kernel would wait for it until its deadline.
                FirstToken::Decided(row) if !decided.get(row as usize).is_some_and(|decided| *decided) => {
                    return Err(SessionError::Undecided { row });
                }
                FirstToken::Decided(row) => (-1, row),
            };
            rows.push(Row {
                sequence,
                position: row.position,
                token,
                from,
                first: first as u32,
                steps: input.steps.min(tables.steps()),
                seed_low: input.seed as u32,
                seed_high: (input.seed >> 32) as u32,
                inverse_temperature: input.inverse_temperature,
                slot: row.sequence.0,
                reserved: [0; 2],
            });
        }
    }
    Ok((rows, pages))
}

/// Whether a launch ends when the cache has its rows.
///
/// # Errors
/// A launch that ends there although its logits are wanted, or although it begins with what another decided.
pub(super) fn only_fills(tables: &Tables<'_>, inputs: &[RowInput], with_logits: bool) -> Result<bool, SessionError> {
    let only_fills = tables.rows().iter().all(|row| !row.wants_logits);
    if only_fills && (with_logits || inputs.iter().any(|input| !matches!(input.first, FirstToken::Given(_)))) {
        return Err(SessionError::NoLogits);
    }
    Ok(only_fills)
}

/// For each row, whether it took part in the last of `steps` steps, as the kernel decides it. `tokens` are those of each step that ran,
/// and of the step after the last one.
fn took_part_last(inputs: &[RowInput], tokens: &[Vec<u32>], steps: u32, eos: &[u32]) -> Vec<bool> {
    let ended = |row: usize| tokens.iter().take(steps as usize).skip(1).any(|step| eos.contains(&step[row]));
    let took_part = |(row, input): (usize, &RowInput)| input.steps >= steps && !ended(row);
    inputs.iter().enumerate().map(took_part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{self, Edit, Guard, PageId, Request, SequenceId};

    const SHAPE: Shape =
        Shape { rows: 4, sequences: 3, context_max: 12, page_rows: 4, pages: 6, window: None, has_state: false };

    fn input(first: FirstToken, steps: u32) -> RowInput {
        RowInput { first, steps, inverse_temperature: 0.0, seed: 0 }
    }

    fn request(rows: &[(u32, u32)], edits: &[(u32, u32, u32)]) -> Request {
        let row = |&(s, position)| rows::Row { sequence: SequenceId(s), position, wants_logits: true };
        let edit = |&(s, block, page)| Edit { sequence: SequenceId(s), block, page: Some(PageId(page)) };
        Request { rows: rows.iter().map(row).collect(), steps: 1, edits: edits.iter().map(edit).collect() }
    }

    #[test]
    fn a_sequence_has_one_row_of_the_page_table() {
        let mut guard = Guard::new(SHAPE);
        let edits = [(2, 0, 5), (0, 0, 3), (0, 1, 1)];
        guard.admit(&request(&[(0, 0), (0, 1), (0, 2)], &edits)).unwrap().finish(1);
        let tables = guard.admit(&request(&[(2, 0), (0, 3), (0, 4), (0, 5)], &[])).unwrap();
        let inputs: Vec<RowInput> = (0..4).map(|token| input(FirstToken::Given(token), 1)).collect();
        let (rows, pages) = encode_rows(&tables, &inputs, &[], 10).unwrap();
        assert_eq!(pages, [5, 5, 5, 3, 1, 5]);
        let of = |row: &Row| (row.sequence, row.first, row.position, row.token);
        assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), [(0, 0, 0, 0), (1, 1, 3, 1), (1, 1, 4, 2), (1, 1, 5, 3)]);
        // Its states stay where they are, whichever row of a launch it has.
        assert_eq!(rows.iter().map(|row| row.slot).collect::<Vec<_>>(), [2, 0, 0, 0]);
    }

    #[test]
    fn a_token_that_no_row_decided_is_refused() {
        let mut guard = Guard::new(SHAPE);
        let tables = guard.admit(&request(&[(0, 0)], &[(0, 0, 0)])).unwrap();
        let encoded = |first, decided: &[bool]| encode_rows(&tables, &[input(first, 1)], decided, 10);
        assert!(encoded(FirstToken::Decided(1), &[false, true]).is_ok());
        // The row took no part in the last step, the launch had no such row, or the words began anew.
        for decided in [&[true, false][..], &[true], &[]] {
            let refused = encoded(FirstToken::Decided(1), decided).unwrap_err();
            assert_eq!(refused.to_string(), "row 1 decided no token in the step before this launch");
        }
        let refused = encoded(FirstToken::Given(10), &[]).unwrap_err();
        assert_eq!(refused.to_string(), "token 10 is not below the vocabulary of 10");
    }

    #[test]
    fn rows_that_end_early_decide_nothing_for_the_next_launch() {
        let inputs = [3, 3, 2, 3].map(|steps| input(FirstToken::Given(7), steps));
        // The first token is given, so it ends nothing; the last one ends its row after the launch.
        let tokens = [[7, 1, 1, 1], [1, 7, 1, 1], [1, 1, 1, 1], [1, 1, 1, 7]].map(Vec::from);
        assert_eq!(took_part_last(&inputs, &tokens, 3, &[7]), [true, false, false, true]);
        assert_eq!(took_part_last(&inputs, &tokens, 3, &[]), [true, true, false, true]);
    }
}
