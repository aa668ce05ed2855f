//! Owns `Watched`, a loaded function whose launches are waited for under watch, and `Kernel`, one with the queues of its schedule.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytemuck::{NoUninit, Zeroable};

use super::driver::{Device, DriverError};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::module::{Function, Module};
use super::session::{SessionError, Stamped, Stuck, StuckOn};
use super::stream::{Argument, Event, LaunchShape, Pace, Stream, Wait};
use crate::codegen::abi::{EOS_MAX, Params, Queues, Tables};
use crate::codegen::emit::{ENTRY_POINT, Trace};
use crate::ir::layout::packet_row_bytes;
use crate::ir::op::Role;
use crate::ir::program::Program;
use crate::ir::schedule::{Machine, Schedule};
use crate::ir::{BufferId, EventId, SmId, TaskId};
use crate::trace::STAMP_WORDS;

/// How long the host waits beyond the deadline that a kernel keeps itself; and again, after it has told the kernel to leave.
const LAUNCH_MARGIN: Duration = Duration::from_secs(1);
const LEAVE_MARGIN: Duration = Duration::from_secs(2);
/// Launches whose times are known: the one that is waited for, the one before it, and the one that is queued after it.
const TIMED: u64 = 3;

/// A function on a device, and the words by which its launches are watched. Launches end in the order in which they were queued.
pub struct Watched {
    pub stream: Arc<Stream>,
    pub shape: LaunchShape,
    function: Function,
    _module: Module,
    report: MappedBuffer,
    /// Devices that run a step together share it.
    abort: Arc<MappedBuffer>,
    /// The device of a session with several, and how many SMs those before it have.
    place: Option<(u32, u32)>,
    /// Around each launch, in turns.
    started: [Event; TIMED as usize],
    ended: [Event; TIMED as usize],
    /// Launches that were queued, and launches that were waited for.
    queued: AtomicU64,
    finished: AtomicU64,
    last_step: Pace,
}

impl Watched {
    /// Loads `entry` of a cubin. `registers` are those that the warps of a block share after they moved them; 0: none move.
    pub fn load(
        device: &Device,
        cubin: &[u8],
        entry: &str,
        shape: LaunchShape,
        registers: u32,
    ) -> Result<Watched, SessionError> {
        Watched::load_on(device, Arc::new(device.stream()?), cubin, entry, shape, registers)
    }

    /// As [`Watched::load`], for launches on a stream that others may use, too: launches follow one another in the order in which they
    /// were queued there.
    pub fn load_on(
        device: &Device,
        stream: Arc<Stream>,
        cubin: &[u8],
        entry: &str,
        shape: LaunchShape,
        registers: u32,
    ) -> Result<Watched, SessionError> {
        let module = device.load(cubin)?;
        let function = device.function(&module, entry, shape.smem_dynamic_bytes)?;
        // Warps that ask for more registers than the launch has would wait for ever.
        let found = function.registers * shape.block;
        if found < registers {
            return Err(SessionError::Registers { needed: registers, found });
        }
        Ok(Watched {
            stream,
            report: device.alloc_mapped(shape.grid as usize * 8)?,
            abort: Arc::new(device.alloc_mapped(1)?),
            place: None,
            started: [device.event()?, device.event()?, device.event()?],
            ended: [device.event()?, device.event()?, device.event()?],
            queued: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            last_step: Pace::default(),
            shape,
            function,
            _module: module,
        })
    }

    /// Makes this the kernel of device `index` of several, each with as many blocks. Of others than the first one, `abort` is the word of that one.
    pub fn join(&mut self, index: u32, abort: Option<Arc<MappedBuffer>>) {
        self.place = Some((index, index * self.shape.grid));
        if let Some(abort) = abort {
            self.abort = abort;
        }
    }

    /// The word that ends the launches of this kernel, for those that run with it.
    pub fn abort_word(&self) -> Arc<MappedBuffer> {
        Arc::clone(&self.abort)
    }

    /// Ends what runs after [`Watched::begin`] of a launch that will have no [`Watched::end`], and waits until it has left. What does not leave
    /// keeps its memory.
    pub fn abandon(&self) {
        let left = self.abort.store(0, 1).and_then(|()| self.stream.wait_timeout(LEAVE_MARGIN));
        // The caller has an error to tell, which explains this one.
        drop(left);
    }

    /// Where a kernel reports what it waited for, and the word that tells it to leave.
    pub fn watch_words(&self) -> (u64, u64) {
        (self.report.address(), self.abort.address())
    }

    /// Queues a launch and returns at once.
    pub fn launch(&self, params: &impl NoUninit) -> Result<(), SessionError> {
        self.begin()?;
        self.queue(params)?;
        self.end()
    }

    /// Before the first of several kernels that are waited for together.
    pub fn begin(&self) -> Result<(), SessionError> {
        // A launch that runs still uses the words. One that is queued after it shares them: if the first gives up, both leave.
        if !self.is_busy() {
            self.abort.store(0, 0)?;
            self.report.fill(0);
        }
        Ok(self.started[self.slot(&self.queued)].record(&self.stream)?)
    }

    /// The end of the launch that was queued last; `None`: there was none.
    pub fn last_end(&self) -> Option<&Event> {
        let last = self.queued.load(Ordering::Relaxed).checked_sub(1)?;
        Some(&self.ended[(last % TIMED) as usize])
    }

    /// Whether a launch was queued that was not waited for.
    fn is_busy(&self) -> bool {
        self.queued.load(Ordering::Relaxed) != self.finished.load(Ordering::Relaxed)
    }

    fn slot(&self, count: &AtomicU64) -> usize {
        (count.load(Ordering::Relaxed) % TIMED) as usize
    }

    /// Queues the kernel between [`Watched::begin`] and [`Watched::end`]. If one gives up, those after it leave at their first wait.
    pub fn queue(&self, params: &impl NoUninit) -> Result<(), SessionError> {
        let argument = Argument::Struct(bytemuck::bytes_of(params));
        Ok(self.stream.launch_cooperative(&self.function, &self.shape, &[argument])?)
    }

    /// After the last kernel.
    pub fn end(&self) -> Result<(), SessionError> {
        self.ended[self.slot(&self.queued)].record(&self.stream)?;
        self.queued.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until the launch that is waited for next has begun its last step, as `is_last` tells, or has ended. After `timeout` it
    /// returns all the same: [`Watched::finish`] finds out why.
    pub fn await_last_step(
        &self,
        timeout: Duration,
        mut is_last: impl FnMut() -> Result<bool, DriverError>,
    ) -> Result<(), SessionError> {
        let ended = &self.ended[self.slot(&self.finished)];
        self.last_step.wait(timeout + LAUNCH_MARGIN, || Ok(is_last()? || ended.is_done()?))?;
        Ok(())
    }

    /// Waits for the oldest queued launch: its time on the device, in microseconds. `timeout` is the deadline that it was given, `grid` names
    /// what a task or a wave belongs to.
    ///
    /// # Errors
    /// A launch that gave up, or one that did not end.
    pub fn finish(&self, timeout: Duration, grid: impl Fn(&Stuck) -> Option<String>) -> Result<f64, SessionError> {
        let slot = self.slot(&self.finished);
        self.finished.fetch_add(1, Ordering::Relaxed);
        if self.stream.wait_event(&self.ended[slot], timeout + LAUNCH_MARGIN)? == Wait::TimedOut {
            self.abort.store(0, 1)?;
            if self.stream.wait_timeout(LEAVE_MARGIN)? == Wait::TimedOut {
                return Err(SessionError::Lost);
            }
        }
        if self.abort.load(0)? != 0 {
            let timeout_ms = timeout.as_millis() as u64;
            let named = |stuck: Stuck| Stuck { grid: grid(&stuck), ..stuck };
            return Err(SessionError::Hung { timeout_ms, stuck: self.stuck().into_iter().map(named).collect() });
        }
        Ok(self.started[slot].elapsed_us(&self.ended[slot])?)
    }

    /// How long the device was idle before the launch that was waited for last, since the end of the launch before it, in microseconds.
    ///
    /// # Errors
    /// Fewer than two launches.
    pub fn gap_us(&self) -> Result<f64, SessionError> {
        let count = self.finished.load(Ordering::Relaxed);
        let (Some(before), Some(last)) = (count.checked_sub(2), count.checked_sub(1)) else {
            return Err(SessionError::NotQueued);
        };
        let of = |count: u64| (count % TIMED) as usize;
        Ok(self.ended[of(before)].elapsed_us(&self.started[of(last)])?)
    }

    /// What each SM that gave up has reported.
    fn stuck(&self) -> Vec<Stuck> {
        let words = self.report.snapshot();
        let stuck = |(sm, r): (usize, &[u32])| Stuck {
            sm: SmId::from(sm + self.place.map_or(0, |(_, before)| before as usize)),
            device: self.place.map(|(device, _)| device),
            step: r[1],
            task: (r[2] != u32::MAX).then_some(TaskId(r[2])),
            event: (r[3] != u32::MAX).then_some(EventId(r[3])),
            observed: r[4],
            expected: r[5],
            kind: match r[6] {
                1 => StuckOn::Packet,
                2 => StuckOn::RingFull,
                3 => StuckOn::RingEmpty,
                4 => StuckOn::History,
                5 => StuckOn::Wave,
                6 => StuckOn::Peer,
                7 => StuckOn::Turn,
                other => StuckOn::Unknown(other),
            },
            grid: None,
        };
        let reported = words.chunks_exact(8).enumerate().filter(|(_, r)| r[0] != 0);
        reported.map(stuck).collect()
    }
}

/// The device of a machine that a kernel is loaded for, and the word that ends the launches of all; `None`: one of its own.
pub(super) struct Part {
    pub index: u32,
    pub abort: Option<Arc<MappedBuffer>>,
}

/// A kernel on a device, and its queues.
pub(super) struct Kernel {
    pub watched: Watched,
    pub schedule: Schedule,
    pub pack: Arc<DeviceBuffer>,
    /// Its device, of those that run a step together.
    pub index: u32,
    tables: DeviceTables,
    stamps: DeviceBuffer,
    /// Tasks of one SM and step that stamps have room for; 0 without them.
    stamps_max: usize,
}

impl Kernel {
    /// Loads a cubin, and uploads the queues and streams of its proven schedule. One that was compiled with time stamps has room for those
    /// of `steps_max` steps.
    pub fn load(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
    ) -> Result<Kernel, SessionError> {
        Kernel::load_part(device, queues, cubin, trace, steps_max, pack, Part { index: 0, abort: None })
    }

    /// As [`Kernel::load`], of one device of several.
    pub fn load_part(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        trace: Trace,
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        part: Part,
    ) -> Result<Kernel, SessionError> {
        let schedule = queues.validated().schedule();
        let machine = &schedule.machine;
        if pack.devices() != machine.devices {
            return Err(SessionError::Devices { expected: machine.devices, found: pack.devices() });
        }
        let sms = machine.sms / machine.devices;
        let smem = machine.smem.iter().map(|part| part.offset + part.bytes).max().unwrap_or(0);
        let block = (machine.consumer_warps + machine.loader_warps) * 32;
        let shape = LaunchShape { grid: sms, block, smem_dynamic_bytes: smem, cluster: 1, kept: None };
        let mut watched = Watched::load(device, cubin, ENTRY_POINT, shape, registers_needed(machine))?;
        let several = machine.devices > 1;
        if several {
            watched.join(part.index, part.abort);
        }
        let of_part = several.then(|| queues.tables().of_device(machine, part.index));
        let stamps_max = if trace == Trace::On { schedule.queue_max() } else { 0 };
        // The token after the last step is selected once more, in a step of its own.
        let stamp_words = (u64::from(steps_max) + 1) * u64::from(sms) * (stamps_max * STAMP_WORDS) as u64;
        Ok(Kernel {
            stamps: device.alloc((stamp_words * 8).max(16))?,
            stamps_max,
            tables: DeviceTables::upload(device, &watched.stream, of_part.as_ref().unwrap_or(queues.tables()))?,
            schedule: schedule.clone(),
            watched,
            pack,
            index: part.index,
        })
    }

    /// What every launch passes; the caller fills in the rest.
    ///
    /// # Errors
    /// More end-of-sequence ids than a kernel takes.
    pub fn params(&self, timeout: Duration, eos: &[u32]) -> Result<Params, SessionError> {
        if eos.len() > EOS_MAX {
            return Err(SessionError::EosCount { found: eos.len() });
        }
        let mut ids = [0i32; EOS_MAX];
        for (to, &id) in ids.iter_mut().zip(eos) {
            *to = id as i32;
        }
        let (report, abort) = self.watched.watch_words();
        Ok(Params {
            pack: self.pack.on(self.index).address(),
            entries: self.tables.entries.address(),
            entry_index: self.tables.entry_index.address(),
            runs: self.tables.runs.address(),
            run_index: self.tables.run_index.address(),
            report,
            abort,
            stamps: self.stamps.address(),
            timeout_ns: timeout.as_nanos() as u64,
            eos_count: eos.len() as u32,
            eos: ids,
            ..Params::zeroed()
        })
    }

    /// What a launch of the first device passes, with what is this device's own; the caller fills in cache, exchange, logits and prompt.
    ///
    /// # Errors
    /// As [`Kernel::params`].
    pub fn params_like(&self, first: &Params, timeout: Duration, eos: &[u32]) -> Result<Params, SessionError> {
        let Params { pack, entries, entry_index, runs, run_index, report, abort, stamps, .. } =
            self.params(timeout, eos)?;
        Ok(Params { pack, entries, entry_index, runs, run_index, report, abort, stamps, ..*first })
    }

    /// Device address of each SM's numbers of entries and runs in a launch that only fills the cache.
    pub fn fills(&self) -> u64 {
        self.tables.fills.address()
    }

    /// The values of row `row` of an exchange buffer of one phase whose packets have `tag`; NaN in place of others. Nothing of a buffer that
    /// has no packets. `read` returns packets from a byte on.
    pub fn exchanged(
        &self,
        buffer: BufferId,
        row: u32,
        tag: u32,
        read: impl FnOnce(u64, usize) -> Result<Vec<u64>, SessionError>,
    ) -> Result<Vec<f32>, SessionError> {
        let Schedule { program, placement, .. } = &self.schedule;
        let declared = program.buffers.get(buffer.index());
        let declared = declared.filter(|declared| !declared.words && row < declared.rows);
        let (Some(declared), Some(at)) = (declared, placement.get(buffer.index()).copied().flatten()) else {
            return Ok(vec![]);
        };
        let (of_packet, cols) = (4 / declared.dtype.bytes(), declared.cols as usize);
        let packets = read(at + u64::from(row) * packet_row_bytes(declared), cols.div_ceil(of_packet))?;
        Ok(values_of(&packets, of_packet, tag).take(cols).collect())
    }

    /// Forgets all stamps: one that a launch leaves out is 0, not that of an earlier launch.
    pub fn clear_stamps(&mut self) -> Result<(), SessionError> {
        Ok(self.stamps.zero(&self.watched.stream)?)
    }

    /// What the last launch, of `steps` steps in `device_us` microseconds, stamped.
    pub fn stamped(&self, steps: u32, device_us: f64) -> Result<Stamped, SessionError> {
        let words = steps as usize * self.watched.shape.grid as usize * self.stamps_max * STAMP_WORDS;
        Ok(Stamped {
            words: self.stamps.download(&self.watched.stream, 0, words)?,
            tasks_max: self.stamps_max,
            device_us,
        })
    }

    /// Waits for the queued launch: its time on the device, in microseconds. `timeout` is the deadline that it was given.
    ///
    /// # Errors
    /// A launch that gave up, or one that did not end.
    pub fn finish(&self, timeout: Duration) -> Result<f64, SessionError> {
        let regime = self.schedule.regimes.first();
        let task = |stuck: &Stuck| regime.and_then(|regime| regime.tasks.get(stuck.task?.index()));
        self.watched.finish(timeout, |stuck| {
            task(stuck).map(|task| self.schedule.program.grids[task.grid.index()].name.clone())
        })
    }
}

/// Registers of a block after its warps moved them; 0: none move.
fn registers_needed(machine: &Machine) -> u32 {
    let Machine { consumer_warps, loader_warps, registers_per_thread, loader_registers, .. } = *machine;
    if loader_registers == 0 {
        0
    } else {
        32 * (consumer_warps * registers_per_thread + loader_warps * loader_registers)
    }
}

/// Queues and streams on a device.
struct DeviceTables {
    entries: DeviceBuffer,
    entry_index: DeviceBuffer,
    runs: DeviceBuffer,
    run_index: DeviceBuffer,
    fills: DeviceBuffer,
}

impl DeviceTables {
    fn upload(device: &Device, stream: &Stream, tables: &Tables) -> Result<DeviceTables, SessionError> {
        Ok(DeviceTables {
            entries: uploaded(device, stream, bytemuck::cast_slice(&tables.entries))?,
            entry_index: uploaded(device, stream, bytemuck::cast_slice(&tables.entry_index))?,
            runs: uploaded(device, stream, bytemuck::cast_slice(&tables.runs))?,
            run_index: uploaded(device, stream, bytemuck::cast_slice(&tables.run_index))?,
            fills: uploaded(device, stream, bytemuck::cast_slice(&tables.fills))?,
        })
    }
}

/// A buffer with these bytes. It has at least 16, because a device has no memory of 0 bytes.
pub(super) fn uploaded(device: &Device, stream: &Stream, bytes: &[u8]) -> Result<DeviceBuffer, SessionError> {
    let mut buffer = device.alloc(bytes.len().max(16) as u64)?;
    buffer.upload(stream, 0, bytes)?;
    Ok(buffer)
}

/// Memory with a pattern that no kernel writes, so that a value that is read before it is written is noticed.
pub(super) fn poisoned(device: &Device, stream: &Stream, bytes: u64) -> Result<DeviceBuffer, DriverError> {
    let mut buffer = device.alloc(bytes.max(16))?;
    buffer.poison(stream)?;
    Ok(buffer)
}

/// The cache arena that a kernel is given, or one of its own; of several devices, one on each.
pub(super) fn cache_or_own(
    cache: Option<Arc<DeviceBuffer>>,
    device: &Device,
    stream: &Stream,
    bytes: u64,
) -> Result<Arc<DeviceBuffer>, DriverError> {
    if let Some(cache) = cache {
        return Ok(cache);
    }
    let of_other = |other: &Device| {
        let stream = other.stream()?;
        let cache = poisoned(other, &stream, bytes)?;
        stream.synchronize()?;
        Ok(cache)
    };
    let others = device.others().iter().map(of_other).collect::<Result<_, DriverError>>()?;
    Ok(Arc::new(poisoned(device, stream, bytes)?.with_others(others)))
}

/// The buffer of the first operand with a role.
pub(super) fn first_buffer(program: &Program, role: Role) -> Option<BufferId> {
    program.grids.iter().find_map(|grid| grid.operand(role)).map(|operand| operand.buffer)
}

/// Logits of one row.
pub(super) fn vocab(program: &Program) -> u32 {
    first_buffer(program, Role::Logits).map_or(0, |buffer| program.buffers[buffer.index()].cols)
}

/// The values of packets, of which each has so many; NaN in place of those with another tag.
fn values_of(packets: &[u64], of_packet: usize, tag: u32) -> impl Iterator<Item = f32> {
    packets.iter().flat_map(move |&packet| {
        let (payload, current) = (packet as u32, (packet >> 32) as u32 == tag);
        let bits = if of_packet == 2 { [payload << 16, payload & 0xffff_0000] } else { [payload; 2] };
        bits.into_iter().take(of_packet).map(move |bits| if current { f32::from_bits(bits) } else { f32::NAN })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_another_step_have_no_values() {
        let packet = |tag: u64, payload: u32| tag << 32 | u64::from(payload);
        let packets = [packet(7, 0x4000_3f80), packet(6, 0x4000_3f80)];
        let two: Vec<f32> = values_of(&packets, 2, 7).collect();
        assert!(two[..2] == [1.0, 2.0] && two[2].is_nan() && two[3].is_nan(), "{two:?}");
        // The bits of the id of an expert.
        let ids: Vec<u32> = values_of(&[packet(7, 127)], 1, 7).map(f32::to_bits).collect();
        assert_eq!(ids, [127]);
    }
}
