//! Owns wave kernels with their device memory: `WavesSession` reads prompt chunks of one sequence into a shared cache and decides what
//! follows the last one, `StepsSession` runs steps of many rows over one.

use super::driver::{Device, DriverError};
use super::kernel::{Watched, cache_or_own, uploaded, vocab};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::peers::{CacheMap, Meeting, all_or_none, far, together};
use super::rows::{
    RowInput, RowLauncher, RowsLaunched, Steps, choose_now, encode_rows, fits, given, may_queue, only_fills,
    out_of_range, queue_each, rows_of_steps,
};
use super::sampler::{Asked, SamplerSession};
use super::session::{SessionError, Stuck};
use super::step_memory::StepMemory;
use super::stream::{Event, LaunchShape, Stream};
use super::tables::{LaunchTables, Placed};
use super::tensor_map::{cache_maps, tensor_maps};
use crate::codegen::abi::Row;
use crate::codegen::emit::Trace;
use crate::codegen::waves::{ENTRY_POINT, WaveDevicesParams, WaveParams, encode};
use crate::ir::BufferId;
use crate::ir::program::Space;
use crate::rows::{Shape, Tables, runs};
use crate::trace::STAMP_WORDS;
use crate::waves::{Form, Machine, Plan, Proven, Ragged, WithTail, WorkId};
use std::collections::{BTreeMap, VecDeque};
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How long a launch may take, and each of its steps beside that.
const TIMEOUT: Duration = Duration::from_secs(5);
const STEP_TIMEOUT: Duration = Duration::from_millis(20);
/// In a mailbox: no token yet.
const UNSAID: u32 = u32::MAX;

/// A wave kernel of any form, on one device or on several that run it together.
struct Loaded {
    /// The first device, or the only one.
    own: OnDevice,
    peers: Vec<OnDevice>,
    meeting: Meeting,
    /// Which device has which part of the cache.
    cache_map: CacheMap,
    shape: Shape,
    vocab: u32,
    /// The grid of each wave, for errors.
    grids: Vec<String>,
    /// Waves of a launch that decides nothing.
    fills: u32,
    ragged: Option<Ragged>,
    /// Where the ids that rows chose lie, by the exchange of the program that has them.
    choices: BTreeMap<BufferId, Chosen>,
    pack: Arc<DeviceBuffer>,
    cache: Arc<DeviceBuffer>,
    /// The tag of the next wave's packets. Memory of zeros has tag 0.
    tag: u32,
    /// Bytes of the arena that hold packets.
    packets: Vec<Range<u64>>,
    /// Words of a device's stamps of a step; 0 without them.
    stamp_words: usize,
}

/// What one device has of a wave kernel.
struct OnDevice {
    watched: Watched,
    waves: DeviceBuffer,
    shares: DeviceBuffer,
    records: DeviceBuffer,
    /// Tensor maps of weights.
    boxes: DeviceBuffer,
    memory: StepMemory,
    /// For a tail: device address of the residual of a chunk.
    taken: u64,
    tables: LaunchTables,
    stamps: DeviceBuffer,
}

/// Ids that rows chose: the first byte, ids of a row, and bytes of all.
#[derive(Clone, Copy)]
struct Chosen {
    at: u64,
    slots: usize,
    bytes: u64,
}

impl Chosen {
    fn of(plan: &Plan, at: WorkId) -> Chosen {
        let work = &plan.work[at.index()];
        Chosen { at: work.place, slots: work.cols as usize, bytes: work.bytes(plan.rows) }
    }
}

/// What a launch is given in addition to its rows.
#[derive(Clone, Copy)]
struct Wanted {
    steps: u32,
    only_fills: bool,
    /// Device addresses, or 0.
    logits: u64,
    mailbox: u64,
}

/// What a wave kernel has in common with other kernels of the model.
struct Shared {
    pack: Arc<DeviceBuffer>,
    /// `None`: it has a cache of its own.
    cache: Option<Arc<DeviceBuffer>>,
    /// Of each device.
    streams: Vec<Arc<Stream>>,
}

/// The same, with the cache that it has in any case.
struct Buffers {
    pack: Arc<DeviceBuffer>,
    cache: Arc<DeviceBuffer>,
    streams: Vec<Arc<Stream>>,
}

/// A stream of each device that runs a model together with `device`.
fn streams_of(device: &Device) -> Result<Vec<Arc<Stream>>, DriverError> {
    iter::once(device).chain(device.others()).map(|device| Ok(Arc::new(device.stream()?))).collect()
}

/// Words of a device's stamps of a step of a kernel that was compiled with `trace`.
fn stamp_words(plan: &Plan, trace: Trace) -> usize {
    let Machine { sms, devices, .. } = plan.machine;
    if trace == Trace::On { (sms / devices) as usize * plan.waves.len() * STAMP_WORDS } else { 0 }
}

impl OnDevice {
    /// Its stream, and the tables of its launches.
    fn tables(&self) -> (&Stream, &LaunchTables) {
        (&self.watched.stream, &self.tables)
    }

    /// Loads the part of device `index`. `abort`: the word of the first device. A launch has at most `steps_max` steps.
    fn load(
        device: &Device,
        index: u32,
        proven: &Proven<'_>,
        cubin: &[u8],
        (trace, steps_max): (Trace, u32),
        Buffers { pack, cache, streams }: &Buffers,
        abort: Option<Arc<MappedBuffer>>,
    ) -> Result<OnDevice, SessionError> {
        let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
        let m = &plan.machine;
        let launch = LaunchShape {
            grid: m.sms / m.devices,
            block: (m.warps + m.loader_warps) * 32,
            smem_dynamic_bytes: plan.smem_bytes(),
            cluster: if plan.machine.pairs { 2 } else { 1 },
            kept: None,
        };
        let registers = 32 * (m.warps * m.registers + m.loader_warps * m.loader_registers);
        let stream = &streams[index as usize];
        let mut watched = Watched::load_on(device, stream.clone(), cubin, ENTRY_POINT, launch, registers)?;
        if m.devices > 1 {
            watched.join(index, abort);
        }
        let tables = encode(proven, index);
        let mut maps = tensor_maps(device, &tables.boxes, pack.on(index).address())?;
        maps.extend(cache_maps(device, &tables.caches, cache.on(index).address())?);
        // Logits of all devices lie on the first one.
        let logits = match plan.form {
            Form::Steps | Form::Tail if index == 0 => u64::from(plan.rows) * u64::from(vocab(program)),
            _ => 0,
        };
        let mut memory = StepMemory::alloc(device, stream, plan.work_bytes(), logits)?;
        // Columns that pad the input of a product stay what they are here.
        memory.zero_exchange(stream, 0..plan.work_bytes())?;
        watched.shape.kept = memory.kept();
        let sequences = match plan.form {
            Form::Chunk => 1,
            Form::Steps | Form::Tail => u64::from(plan.rows),
        };
        let blocks = Shape::of(program).map_or(0, |shape| shape.blocks());
        Ok(OnDevice {
            waves: uploaded(device, stream, bytemuck::cast_slice(&tables.waves))?,
            shares: uploaded(device, stream, bytemuck::cast_slice(&tables.shares))?,
            records: uploaded(device, stream, bytemuck::cast_slice(&tables.records))?,
            boxes: uploaded(device, stream, &maps)?,
            memory,
            taken: 0,
            stamps: device.alloc((stamp_words(plan, trace) as u64 * u64::from(steps_max) * 8).max(16))?,
            // Rows and a count for each step that is a kernel of its own.
            tables: LaunchTables::new(
                device,
                steps_max.max(1),
                u64::from(steps_max.max(1)) * u64::from(plan.rows),
                sequences * u64::from(blocks),
            )?,
            watched,
        })
    }
}

impl Loaded {
    fn load(
        device: &Device,
        proven: &Proven<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        shared: Shared,
    ) -> Result<Loaded, SessionError> {
        let (plan, schedule) = (proven.plan(), proven.validated().schedule());
        let program = &schedule.program;
        let (expected, cache) = (plan.machine.devices, shared.cache.as_ref());
        let found = [device.count(), shared.pack.devices(), cache.map_or(expected, |cache| cache.devices())];
        if let Some(&found) = found.iter().find(|found| **found != expected) {
            return Err(SessionError::Devices { expected, found });
        }
        let of_rows = Shape::of(program).expect("validate: a batch kernel has tables");
        let shape = Shape { rows: plan.rows, ..of_rows };
        let Shared { pack, cache, streams } = shared;
        let cache = cache_or_own(cache, device, &streams[0], schedule.arena_bytes(Space::Cache))?;
        let buffers = Buffers { pack, cache, streams };
        let own = OnDevice::load(device, 0, proven, cubin, (trace, steps_max), &buffers, None)?;
        let mut peers = vec![];
        for (index, other) in (1..).zip(device.others()) {
            let abort = Some(own.watched.abort_word());
            peers.push(OnDevice::load(other, index, proven, cubin, (trace, steps_max), &buffers, abort)?);
        }
        let Buffers { pack, cache, streams } = buffers;
        let stamp_words = stamp_words(plan, trace);
        let loaded = Loaded {
            shape,
            stamp_words,
            vocab: vocab(program),
            grids: plan.waves.iter().map(|wave| program.grids[wave.grid.index()].name.clone()).collect(),
            fills: plan.fills() as u32,
            ragged: proven.ragged(),
            choices: proven.choices().iter().map(|(&buffer, &at)| (buffer, Chosen::of(plan, at))).collect(),
            pack,
            cache,
            tag: 1,
            packets: plan.packets(),
            meeting: Meeting::new(device)?,
            cache_map: if peers.is_empty() { CacheMap::default() } else { CacheMap::of(schedule) },
            own,
            peers,
        };
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        Ok(loaded)
    }

    /// The devices, the first one first.
    fn devices(&self) -> impl Iterator<Item = &OnDevice> + Clone {
        iter::once(&self.own).chain(&self.peers)
    }

    fn streams(&self) -> Vec<&Stream> {
        self.devices().map(|device| device.watched.stream.as_ref()).collect()
    }

    fn peer_streams(&self) -> impl Iterator<Item = &Stream> + Clone {
        self.peers.iter().map(|peer| peer.watched.stream.as_ref())
    }

    fn timeout(steps: u32) -> Duration {
        TIMEOUT + steps * STEP_TIMEOUT
    }

    /// Uploads tables and launches. The caller has found that they fit.
    fn launch(&mut self, (rows, pages): (Vec<Row>, Vec<u32>), wanted: Wanted) -> Result<(), SessionError> {
        let placed = self.upload(&rows, &pages)?;
        let tag = self.take_tags(wanted.steps)?;
        let all: Vec<&Watched> = self.devices().map(|device| &device.watched).collect();
        all_or_none(&all, || {
            all.iter().try_for_each(|watched| watched.begin())?;
            self.queue_kernels(&self.params(&rows, &placed, tag, wanted))?;
            all.iter().try_for_each(|watched| watched.end())
        })
    }

    /// Uploads the tables of a launch to each device, where the counts of meetings then begin at zero.
    fn upload(&mut self, rows: &[Row], pages: &[u32]) -> Result<Vec<Placed>, SessionError> {
        let devices = iter::once(&mut self.own).chain(&mut self.peers);
        Ok(devices.map(|device| device.tables.upload(rows, pages)).collect::<Result<_, _>>()?)
    }

    /// Queues the kernel of each device, given the parameters of all, and lets no later one start before all have ended.
    fn queue_kernels(&self, each: &[WaveParams]) -> Result<(), SessionError> {
        if self.peers.is_empty() {
            return self.own.watched.queue(&each[0]);
        }
        let mut first_block = 0;
        for ((own, device), params) in self.devices().enumerate().zip(each) {
            let far = |at: fn(&WaveParams) -> u64| far(each, own, at);
            device.watched.queue(&WaveDevicesParams {
                params: *params,
                peers: far(|params| params.work),
                peer_counts: far(|params| params.arrived),
                first_block,
                spare: 0,
            })?;
            first_block += device.watched.shape.grid;
        }
        Ok(self.meeting.meet(&self.own.watched.stream, self.peer_streams())?)
    }

    /// The tag of the first wave of a launch of `steps` steps; each wave has the next one. Before tags begin anew, all packets are cleared: one of 2^32 waves
    /// ago would pass for a current one.
    fn take_tags(&mut self, steps: u32) -> Result<u32, SessionError> {
        let waves = steps * self.grids.len() as u32;
        if waves > u32::MAX - self.tag {
            for device in iter::once(&mut self.own).chain(&mut self.peers) {
                for range in &self.packets {
                    device.memory.zero_exchange(&device.watched.stream, range.clone())?;
                }
            }
            // A kernel of another device does not follow in the stream of this one.
            if !self.peers.is_empty() {
                self.streams().into_iter().try_for_each(Stream::synchronize)?;
            }
            self.tag = 1;
        }
        self.tag += waves;
        Ok(self.tag - waves)
    }

    /// The parameters of a launch of `rows` on each device, whose tables are `placed`. The first one alone tells the host what rows decide.
    fn params(&self, rows: &[Row], placed: &[Placed], tag: u32, wanted: Wanted) -> Vec<WaveParams> {
        let Wanted { steps, only_fills, logits, mailbox } = wanted;
        let of_device = |((index, device), placed): ((usize, &OnDevice), &Placed)| {
            let (report, abort) = device.watched.watch_words();
            WaveParams {
                pack: self.pack.on(index as u32).address(),
                cache: self.cache.on(index as u32).address(),
                work: device.memory.exchange(),
                waves: device.waves.address(),
                shares: device.shares.address(),
                records: device.records.address(),
                rows: placed.rows,
                pages: placed.pages,
                arrived: placed.count(0),
                report,
                abort,
                stamps: device.stamps.address(),
                logits,
                mailbox: if index == 0 { mailbox } else { 0 },
                timeout_ns: Loaded::timeout(steps).as_nanos() as u64,
                wave_count: if only_fills { self.fills } else { self.grids.len() as u32 },
                row_count: rows.len() as u32,
                position: rows.first().map_or(0, |row| row.position),
                steps,
                taken: device.taken,
                boxes: device.boxes.address(),
                tag,
                reserved: 0,
            }
        };
        self.devices().enumerate().zip(placed).map(of_device).collect()
    }

    fn finish(&self, steps: u32) -> Result<f64, SessionError> {
        let grid = |stuck: &Stuck| self.grids.get(stuck.step as usize).cloned();
        together(self.devices().map(|device| device.watched.finish(Loaded::timeout(steps), grid)))
    }

    /// The ids that row `row` of the last launch chose in its last step, by slot; none of a choice that the kernel does not make. Where nothing was
    /// chosen since [`Loaded::poison_choices`], no expert has the id.
    fn chosen(&self, buffer: BufferId, row: u32) -> Result<Vec<u32>, SessionError> {
        let Some(&Chosen { at, slots, .. }) = self.choices.get(&buffer).filter(|_| row < self.shape.rows) else {
            return Ok(vec![]);
        };
        let first = at + u64::from(row) * slots as u64 * 4;
        Ok(self.own.memory.read_words(&self.own.watched.stream, first, slots)?)
    }

    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.cache_map.read(&self.cache, &self.streams(), at, bytes)?)
    }

    /// Forgets what rows chose.
    fn poison_choices(&mut self) -> Result<(), SessionError> {
        for Chosen { at, bytes, .. } in self.choices.values() {
            self.own.memory.poison_words(&self.own.watched.stream, *at..at + bytes)?;
        }
        Ok(())
    }

    /// Stamps of a launch of `steps` steps, `[sms][steps][waves][STAMP_WORDS]`, by the clock of the first device; none if the kernel was compiled without.
    fn stamps(&self, steps: u32) -> Result<Vec<u64>, SessionError> {
        let mut all = vec![];
        // Devices have clocks of their own. All blocks see the first meeting of a launch end at about the same time.
        let (mut met_first, count) = (None, self.stamp_words * steps as usize);
        let each = count / (self.own.watched.shape.grid as usize).max(1);
        for device in self.devices() {
            let stamps: Vec<u64> = device.stamps.download(&device.watched.stream, 0, count)?;
            let of_block = |stamps: &[u64]| stamps.get(STAMP_WORDS + 1).copied().filter(|at| *at > 0);
            let met = stamps.chunks_exact(each.max(1)).filter_map(of_block).min().unwrap_or(0);
            let shift = met_first.get_or_insert(met).wrapping_sub(met);
            let moved = |(i, at): (usize, u64)| match i % STAMP_WORDS {
                0..=3 if at > 0 => at.wrapping_add(shift),
                _ => at,
            };
            all.extend(stamps.into_iter().enumerate().map(moved));
        }
        Ok(all)
    }
}

/// A wave kernel that reads chunks, and maybe its tail.
pub struct WavesSession {
    loaded: Loaded,
    /// Its tail, on the same stream.
    tail: Option<StepsSession>,
    /// Chunks that are queued or being read, oldest first, and whether a tail follows each; at most two.
    flying: VecDeque<bool>,
    /// The chunk that was queued last has a tail.
    ends_with_tail: bool,
}

/// What the last row of a chunk is for.
pub enum Last<'a> {
    /// Its keys and values.
    Nothing,
    /// The token that the kernel decides after it, by the temperature and seed of a row.
    Token { row: RowInput, with_logits: bool },
    /// Its logits, and what a sampler chooses from them: row 0 is asked.
    Sampled(&'a mut SamplerSession, &'a [Asked<'a>]),
    /// The same, once [`WavesSession::choose`] has queued the sampler.
    Unchosen,
}

/// What a chunk left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkRead {
    /// Device time of the chunk.
    pub chunk_us: f64,
    /// Device time of its tail; 0 without one.
    pub tail_us: f64,
    /// What the kernel decided after the last row.
    pub token: Option<u32>,
}

impl WavesSession {
    /// Loads the waves of a proven plan of chunks; `trace` is what the cubin was compiled with. `pack` and `cache` are those of the batch
    /// kernel that the plan was proven against.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn load(
        device: &Device,
        proven: &Proven<'_>,
        cubin: &[u8],
        trace: Trace,
        pack: Arc<DeviceBuffer>,
        cache: Arc<DeviceBuffer>,
    ) -> Result<WavesSession, SessionError> {
        let shared = Shared { pack, cache: Some(cache), streams: streams_of(device)? };
        let loaded = Loaded::load(device, proven, cubin, trace, 1, shared)?;
        Ok(WavesSession { loaded, tail: None, flying: VecDeque::new(), ends_with_tail: false })
    }

    /// As [`WavesSession::load`], with the tail that was proven after the plan of chunks. `cubins`: that of chunks, and that of the tail.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn load_with_tail(
        device: &Device,
        proven: &WithTail<'_>,
        cubins: [&[u8]; 2],
        trace: Trace,
        pack: Arc<DeviceBuffer>,
        cache: Arc<DeviceBuffer>,
    ) -> Result<WavesSession, SessionError> {
        let [chunk, tail] = cubins;
        let session = WavesSession::load(device, proven.chunk(), chunk, trace, pack, cache)?;
        let loaded = &session.loaded;
        let shared = Shared {
            pack: loaded.pack.clone(),
            cache: Some(loaded.cache.clone()),
            streams: loaded.devices().map(|device| device.watched.stream.clone()).collect(),
        };
        let tail = Loaded::load(device, proven.tail(), tail, trace, 1, shared)?;
        let mut tail = StepsSession::of(device, tail, 1)?;
        let of_tail = iter::once(&mut tail.loaded.own).chain(&mut tail.loaded.peers);
        for (tail, chunk) in of_tail.zip(loaded.devices()) {
            tail.taken = chunk.memory.exchange() + proven.taken();
        }
        Ok(WavesSession { tail: Some(tail), ..session })
    }

    /// What bounds the tables of a launch; its rows are those of a chunk at most.
    pub fn shape(&self) -> &Shape {
        &self.loaded.shape
    }

    /// Whether the last row of a chunk may be for more than its keys and values.
    pub fn decides(&self) -> bool {
        self.tail.is_some()
    }

    /// The stream of its launches.
    pub fn stream(&self) -> &Stream {
        &self.loaded.own.watched.stream
    }

    /// Reads a chunk of one sequence and waits: keys and values of its tokens are in the cache when this returns. `tables` has a row for
    /// each token, at consecutive positions. The last one wants logits if it is for more than keys and values; no other does.
    ///
    /// # Errors
    /// Tables of another shape, or of several sequences; tokens beyond the vocabulary; a last row that nothing decides after; a launch that
    /// gave up, after which the positions are not written.
    pub fn read(&mut self, tables: Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<ChunkRead, SessionError> {
        self.launch(&tables, tokens, last)?;
        let read = self.finish()?;
        tables.finish(1);
        Ok(read)
    }

    /// Queues the reading of a chunk and returns at once. Its positions are marked as written when queued, because later launches
    /// [`follow`](WavesSession::last_end) it on the device. A second chunk can be queued before the first one was waited for; of two, one
    /// has a tail.
    ///
    /// # Errors
    /// As [`WavesSession::read`]; two chunks, or one with a tail, that were not waited for.
    pub fn queue(&mut self, tables: Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<(), SessionError> {
        self.launch(&tables, tokens, last)?;
        tables.finish(1);
        Ok(())
    }

    fn launch(&mut self, tables: &Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<(), SessionError> {
        let ends = !matches!(last, Last::Nothing);
        if self.flying.len() == 2 || ends && self.flying.contains(&true) {
            return Err(SessionError::NotFinished);
        }
        let loaded = &mut self.loaded;
        if !fits(&loaded.shape, tables, tokens.len()) || tables.steps() != 1 || runs(tables.rows()).count() != 1 {
            return Err(out_of_range(tables));
        }
        let wanting = tables.rows().iter().rev().position(|row| row.wants_logits);
        let wanted = tables.rows().iter().filter(|row| row.wants_logits).count();
        if (wanting, wanted) != if ends { (Some(0), 1) } else { (None, 0) } || ends && self.tail.is_none() {
            return Err(SessionError::NoLogits);
        }
        let (rows, pages) = encode_rows(tables, &given(tokens), &[], loaded.vocab)?;
        let of_tail = rows.last().map(|row| Row { token: -1, from: rows.len() as u32 - 1, first: 0, ..*row });
        let pages_of_tail = pages.clone();
        loaded.launch((rows, pages), Wanted { steps: 1, only_fills: true, logits: 0, mailbox: 0 })?;
        if let (true, Some(tail), Some(row)) = (ends, &mut self.tail, of_tail) {
            tail.end_chunk(row, pages_of_tail, last)?;
        }
        self.flying.push_back(ends);
        self.ends_with_tail = ends;
        Ok(())
    }

    /// Queues the sampler after the chunk that was queued last, with [`Last::Unchosen`].
    ///
    /// # Errors
    /// No such chunk; what the driver refuses.
    pub fn choose(&mut self, sampler: &mut SamplerSession, asked: &[Asked<'_>]) -> Result<(), SessionError> {
        self.tail.as_mut().ok_or(SessionError::NotQueued)?.choose(sampler, asked)
    }

    /// The end of the chunk that was queued last, with its tail.
    pub fn last_end(&self) -> Option<&Event> {
        let tail = self.tail.as_ref().filter(|_| self.ends_with_tail).map(|tail| &tail.loaded);
        tail.unwrap_or(&self.loaded).own.watched.last_end()
    }

    /// As [`RowLauncher::follow`].
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn follow(&mut self, end: &Event) -> Result<(), SessionError> {
        Ok(self.loaded.streams().into_iter().try_for_each(|stream| stream.follow(end))?)
    }

    /// Waits for the oldest queued chunk and its tail.
    ///
    /// # Errors
    /// No chunk is queued, or its launch gave up.
    pub fn finish(&mut self) -> Result<ChunkRead, SessionError> {
        let ends = self.flying.pop_front().ok_or(SessionError::NotQueued)?;
        let chunk = self.loaded.finish(1);
        // If the chunk gave up, its tail has run all the same; its result is ignored.
        let tail = self.tail.as_mut().filter(|_| ends).map(RowLauncher::finish).transpose();
        let (chunk_us, tail) = (chunk?, tail?);
        let token = tail.as_ref().and_then(|tail| tail.tokens.last()?.first().copied());
        Ok(ChunkRead { chunk_us, tail_us: tail.map_or(0.0, |tail| tail.device_us), token })
    }

    /// Logits after the last row of the last chunk that asked for them.
    ///
    /// # Errors
    /// A chunk without a tail; one that was not waited for; what the driver refuses.
    pub fn logits(&self) -> Result<Vec<f32>, SessionError> {
        self.tail.as_ref().ok_or(SessionError::NoLogits)?.logits(0)
    }

    /// As [`RowLauncher::poison_logits`].
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.loaded.poison_choices()?;
        self.tail.as_mut().map_or(Ok(()), RowLauncher::poison_logits)
    }

    /// The ids of experts that row `row` of the last chunk chose, by slot, for the choice that the program has in `buffer`. None of a choice that
    /// only a tail makes, unless `is_last`: the chunk has a tail, and it is its last row.
    ///
    /// # Errors
    /// A chunk that was not waited for; what the driver refuses.
    pub fn chosen(&self, buffer: BufferId, row: u32, is_last: bool) -> Result<Vec<u32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        match &self.tail {
            Some(tail) if is_last && !self.loaded.choices.contains_key(&buffer) => tail.loaded.chosen(buffer, 0),
            _ => self.loaded.chosen(buffer, row),
        }
    }

    /// As [`RowLauncher::read_cache`].
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        self.loaded.read_cache(at, bytes)
    }

    /// Stamps of the last chunk, `[sms][waves][STAMP_WORDS]`; none if the kernel was compiled without.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn stamps(&self) -> Result<Vec<u64>, SessionError> {
        self.loaded.stamps(1)
    }

    /// Stamps of the last tail; `None` if chunks have no tail.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn tail_stamps(&self) -> Result<Option<Vec<u64>>, SessionError> {
        self.tail.as_ref().map(|tail| tail.stamps(1)).transpose()
    }
}

/// A wave kernel that runs steps.
pub struct StepsSession {
    loaded: Loaded,
    /// Host-visible tokens of each row, for each step and for the one after the last. Those of two launches, used in turn.
    mailboxes: [MappedBuffer; 2],
    next_mailbox: usize,
    /// Rows that decided a token in the last step of the last launch, once it has ended.
    decided: usize,
    /// Oldest first.
    flying: VecDeque<Flying>,
    steps_max: u32,
}

#[derive(Clone, Copy)]
struct Flying {
    rows: usize,
    steps: u32,
    /// The tokens are those of the kernel: it decides some, and no sampler does.
    has_tokens: bool,
    /// The sampler has still to be queued.
    is_unchosen: bool,
    /// Which mailbox has its tokens.
    mailbox: usize,
}

impl StepsSession {
    /// Loads the waves of a proven plan of steps; `trace` is what the cubin was compiled with. `pack` and, if it is given, `cache` are
    /// shared with other kernels of the model. A launch has at most `steps_max` steps.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn load(
        device: &Device,
        proven: &Proven<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<StepsSession, SessionError> {
        let shared = Shared { pack, cache, streams: streams_of(device)? };
        StepsSession::of(device, Loaded::load(device, proven, cubin, trace, steps_max, shared)?, steps_max)
    }

    /// With the mailboxes that a loaded kernel of steps needs.
    fn of(device: &Device, loaded: Loaded, steps_max: u32) -> Result<StepsSession, SessionError> {
        let rows = loaded.shape.rows;
        let mailbox = || device.alloc_mapped((steps_max as usize + 1) * rows as usize + 1);
        let (mailboxes, flying) = ([mailbox()?, mailbox()?], VecDeque::new());
        Ok(StepsSession { mailboxes, next_mailbox: 0, decided: 0, flying, steps_max, loaded })
    }

    /// Acts as if `waves` more waves had run, so that a test can reach 2^32 of them without waiting.
    pub fn age(&mut self, waves: u32) {
        self.loaded.tag = self.loaded.tag.saturating_add(waves);
    }

    /// As a tail: queues what follows the last row of a chunk, after the chunk. `row` says which of its rows that is.
    fn end_chunk(&mut self, row: Row, pages: Vec<u32>, last: Last<'_>) -> Result<(), SessionError> {
        match last {
            Last::Nothing => Ok(()),
            Last::Token { row: RowInput { inverse_temperature, seed, .. }, with_logits } => {
                let (seed_low, seed_high) = (seed as u32, (seed >> 32) as u32);
                let row = Row { inverse_temperature, seed_low, seed_high, ..row };
                self.queue_encoded((vec![row], pages), 1, false, with_logits)
            }
            Last::Sampled(sampler, asked) => self.queue_each((vec![row], pages), 1, Some((sampler, asked))),
            Last::Unchosen => self.queue_each((vec![row], pages), 1, None),
        }
    }

    /// Queues a launch whose rows and pages were judged.
    fn queue_encoded(
        &mut self,
        encoded: (Vec<Row>, Vec<u32>),
        steps: u32,
        only_fills: bool,
        with_logits: bool,
    ) -> Result<(), SessionError> {
        let rows = encoded.0.len();
        let logits = if with_logits { self.loaded.own.memory.logits() } else { 0 };
        let mailbox = self.next_mailbox;
        self.mailboxes[mailbox].fill(UNSAID);
        let tokens = if only_fills { 0 } else { self.mailboxes[mailbox].address() };
        self.loaded.launch(encoded, Wanted { steps, only_fills, logits, mailbox: tokens })?;
        self.flies(Flying { rows, steps, has_tokens: !only_fills, is_unchosen: false, mailbox });
        Ok(())
    }

    /// The same, each step as a kernel of its own before the sampler.
    fn queue_each(
        &mut self,
        (rows, pages): (Vec<Row>, Vec<u32>),
        steps: u32,
        choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<(), SessionError> {
        let loaded = &mut self.loaded;
        let placed = loaded.upload(&rows_of_steps(&rows, steps), &pages)?;
        let mailbox = self.next_mailbox;
        let (logits, tokens) = (loaded.own.memory.logits(), self.mailboxes[mailbox].address());
        let tag = loaded.take_tags(steps)?;
        let wanted = Wanted { steps: 1, only_fills: false, logits, mailbox: tokens };
        let of_steps = Steps { rows: placed[0].rows, row_count: rows.len(), steps };
        let (is_unchosen, waves) = (choosing.is_none(), loaded.grids.len() as u32);
        let loaded = &self.loaded;
        let all: Vec<&Watched> = loaded.devices().map(|device| &device.watched).collect();
        all_or_none(&all, || {
            all[1..].iter().try_for_each(|watched| watched.begin())?;
            queue_each(all[0], of_steps, logits, choosing, |step, _| {
                let first = step as usize * rows.len();
                if step > 0 {
                    let peers = loaded.peers.iter().map(OnDevice::tables);
                    loaded.meeting.tell_rows(loaded.own.tables(), peers, first, rows.len())?;
                }
                let placed: Vec<Placed> = placed.iter().map(|placed| placed.of_step(step, first)).collect();
                let mut each = loaded.params(&rows, &placed, tag + step * waves, wanted);
                each.iter_mut().for_each(|params| params.position += step);
                loaded.queue_kernels(&each)
            })?;
            all[1..].iter().try_for_each(|watched| watched.end())
        })?;
        self.flies(Flying { rows: rows.len(), steps, has_tokens: false, is_unchosen, mailbox });
        Ok(())
    }

    /// Notes what the next launch will find of a queued one.
    fn flies(&mut self, flying: Flying) {
        self.next_mailbox = 1 - flying.mailbox;
        self.decided = if flying.has_tokens { flying.rows } else { 0 };
        self.flying.push_back(flying);
    }

    /// The token of a row in a step of a launch; [`UNSAID`] before the step.
    fn token(&self, flying: &Flying, step: u32, row: usize) -> Result<u32, DriverError> {
        self.mailboxes[flying.mailbox].load(1 + (step * self.loaded.shape.rows) as usize + row)
    }

    /// Stamps of the last launch, which had `steps` steps: `[sms][steps][waves][STAMP_WORDS]`; none if the kernel was compiled without.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn stamps(&self, steps: u32) -> Result<Vec<u64>, SessionError> {
        self.loaded.stamps(steps)
    }
}

impl RowLauncher for StepsSession {
    fn shape(&self) -> &Shape {
        &self.loaded.shape
    }

    fn vocab(&self) -> u32 {
        self.loaded.vocab
    }

    fn steps_max(&self) -> u32 {
        self.steps_max
    }

    fn gains(&self, positions: &[u32], others: u32) -> bool {
        self.loaded.ragged.as_ref().is_some_and(|ragged| ragged.gains(positions, others))
    }

    fn split_max(&self) -> u32 {
        self.loaded.ragged.as_ref().map_or(0, Ragged::split_max)
    }

    fn cache(&self) -> Arc<DeviceBuffer> {
        self.loaded.cache.clone()
    }

    fn pack(&self) -> Arc<DeviceBuffer> {
        self.loaded.pack.clone()
    }

    fn queue(&mut self, tables: Tables<'_>, inputs: &[RowInput], with_logits: bool) -> Result<(), SessionError> {
        may_queue(self.flying.iter().map(|flying| flying.has_tokens), inputs, with_logits)?;
        let steps = tables.steps();
        // Every row takes part in every step.
        let ends = inputs.iter().any(|input| input.steps < steps);
        if !fits(&self.loaded.shape, &tables, inputs.len()) || ends || steps > self.steps_max {
            return Err(out_of_range(&tables));
        }
        let only_fills = only_fills(&tables, inputs, with_logits)?;
        let decided = vec![true; self.decided];
        let encoded = encode_rows(&tables, inputs, &decided, self.loaded.vocab)?;
        self.queue_encoded(encoded, steps, only_fills, with_logits)?;
        tables.finish(steps);
        Ok(())
    }

    fn queue_steps(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<(), SessionError> {
        may_queue(self.flying.iter().map(|_| false), inputs, true)?;
        let (steps, loaded) = (tables.steps(), &self.loaded);
        if !fits(&loaded.shape, &tables, inputs.len()) || steps > self.steps_max {
            return Err(out_of_range(&tables));
        }
        if only_fills(&tables, inputs, true)? {
            return Err(SessionError::NoLogits);
        }
        let encoded = encode_rows(&tables, inputs, &[], loaded.vocab)?;
        self.queue_each(encoded, steps, choosing)?;
        tables.finish(steps);
        Ok(())
    }

    fn choose(&mut self, sampler: &mut SamplerSession, asked: &[Asked<'_>]) -> Result<(), SessionError> {
        let is_unchosen = self.flying.front_mut().map(|flying| &mut flying.is_unchosen);
        choose_now(is_unchosen, &self.loaded.own.watched, self.loaded.own.memory.logits(), sampler, asked)
    }

    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, SessionError> {
        let flying = *self.flying.front().ok_or(SessionError::NotQueued)?;
        let Flying { rows, steps, has_tokens, .. } = flying;
        if self.flying.len() > 1 || !has_tokens {
            return Ok(None);
        }
        // One block for each row writes its token. Blocks finish in any order.
        let is_told = || -> Result<bool, DriverError> {
            for step in (1..steps).rev() {
                for row in 0..rows {
                    if self.token(&flying, step, row)? == UNSAID {
                        return Ok(false);
                    }
                }
            }
            Ok(true)
        };
        self.loaded.own.watched.await_last_step(Loaded::timeout(steps), is_told)?;
        let of_row = |row| (1..steps).map(|step| self.token(&flying, step, row)).collect::<Result<Vec<u32>, _>>();
        Ok(Some((0..rows).map(of_row).collect::<Result<_, _>>()?))
    }

    fn finish(&mut self) -> Result<RowsLaunched, SessionError> {
        let flying = self.flying.pop_front().ok_or(SessionError::NotQueued)?;
        let Flying { rows, steps, has_tokens, is_unchosen, .. } = flying;
        if is_unchosen {
            return Err(SessionError::NotChosen);
        }
        let finished = self.loaded.finish(steps);
        if finished.is_err() {
            self.decided = 0;
        }
        let device_us = finished?;
        if !has_tokens {
            return Ok(RowsLaunched { device_us, steps, tokens: vec![] });
        }
        let of_step = |step| (0..rows).map(|row| self.token(&flying, step, row)).collect();
        let tokens = (0..=steps).map(of_step).collect::<Result<_, _>>()?;
        Ok(RowsLaunched { device_us, steps, tokens })
    }

    fn watched(&self) -> &Watched {
        &self.loaded.own.watched
    }

    fn streams(&self) -> Vec<&Stream> {
        self.loaded.streams()
    }

    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        let first = u64::from(row.min(self.loaded.shape.rows - 1)) * u64::from(self.loaded.vocab);
        Ok(self.loaded.own.memory.read_logits(&self.loaded.own.watched.stream, first, self.loaded.vocab as usize)?)
    }

    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        Ok(self.loaded.chosen(buffer, row)?.into_iter().map(f32::from_bits).collect())
    }

    fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.loaded.poison_choices()?;
        Ok(self.loaded.own.memory.poison_logits(&self.loaded.own.watched.stream)?)
    }

    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        self.loaded.read_cache(at, bytes)
    }
}
