//! Owns `Peer`: another device of a session, whose kernel runs each step together with that of the first one; and when their streams wait for
//! each other.
//!
//! All memory that the host fills exists once for each device. Kernels store what crosses to every device at the same places, so a
//! kernel is told how far away the exchange and the logits of each other device are. One abort word ends the kernels of all devices.
//!
//! Kernels of one launch wait for each other, so they are queued on all devices before the host waits for any. A kernel that does not go on from the
//! one before may clear words that another device still reads. So no kernel starts on any device before the one before has ended on all
//! ([`Meeting`]).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::driver::{Device, DriverError};
use super::kernel::{Kernel, Part, Watched};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::session::{Pages, SessionError};
use super::stream::{Event, Stream};
use super::tables::LaunchTables;
use crate::codegen::abi::{PEERS_MAX, Params, Queues};
use crate::codegen::emit::Trace;
use crate::ir::layout::cache_row_bytes;
use crate::ir::op::{Op, Role};
use crate::ir::schedule::Schedule;
use crate::rows::Shape;

/// Another device of a decode kernel.
pub(super) struct Peer {
    pub kernel: Kernel,
    pub exchange: DeviceBuffer,
    pub logits: DeviceBuffer,
    pub prompt: DeviceBuffer,
    pub pages: Option<Pages>,
}

impl Peer {
    /// Loads the kernel of device `index` with the buffers that it needs. `abort` is the word of the first device.
    pub fn load(
        device: &Device,
        index: u32,
        queues: &Queues<'_>,
        cubin: &[u8],
        logits_bytes: u64,
        pack: Arc<DeviceBuffer>,
        abort: Arc<MappedBuffer>,
    ) -> Result<Peer, SessionError> {
        let part = Part { index, abort: Some(abort) };
        let kernel = Kernel::load_part(device, queues, cubin, Trace::Off, 1, pack, part)?;
        let (stream, program) = (&kernel.watched.stream, &kernel.schedule.program);
        let mut exchange = device.alloc(queues.tables().exchange_bytes.max(16))?;
        exchange.zero(stream)?;
        let mut logits = device.alloc(logits_bytes)?;
        logits.poison(stream)?;
        let pages = Shape::of(program).map(|shape| Pages::new(device, &shape)).transpose()?;
        let prompt = device.alloc(u64::from(program.context_max) * 4)?;
        let peer = Peer { logits, prompt, pages, exchange, kernel };
        peer.kernel.watched.stream.synchronize()?;
        Ok(peer)
    }

    /// What a launch of the first device passes, for this one. `cache` is that of all devices.
    pub fn params(
        &self,
        first: &Params,
        cache: &DeviceBuffer,
        timeout: Duration,
        eos: &[u32],
    ) -> Result<Params, SessionError> {
        let logits = if first.logits == 0 { 0 } else { self.logits.address() };
        let own = self.kernel.params_like(first, timeout, eos)?;
        let (cache, exchange) = (cache.on(self.kernel.index).address(), self.exchange.address());
        Ok(Params { cache, exchange, logits, prompt: self.prompt.address(), ..own })
    }
}

/// Where the exchange and the logits of the other devices are, from those of a device, in bytes modulo 2^64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Distances {
    pub peers: [u64; PEERS_MAX],
    pub peer_logits: [u64; PEERS_MAX],
}

/// Those of each device, of the parameters of all.
pub(super) fn distances(each: &[Params]) -> Vec<Distances> {
    let of = |own| Distances {
        peers: far(each, own, |params| params.exchange),
        peer_logits: far(each, own, |params| params.logits),
    };
    (0..each.len()).map(of).collect()
}

/// From an address of device `own` to the same of each other one, in bytes modulo 2^64. `each` has what all devices are given.
pub(super) fn far<P>(each: &[P], own: usize, at: fn(&P) -> u64) -> [u64; PEERS_MAX] {
    let mut offsets = [0; PEERS_MAX];
    let others = each.iter().enumerate().filter(|(device, _)| *device != own);
    for (offset, (_, other)) in offsets.iter_mut().zip(others) {
        *offset = at(other).wrapping_sub(at(&each[own]));
    }
    offsets
}

/// Events by which streams of several devices wait for each other, never the host.
pub(super) struct Meeting {
    /// On the stream of the first device.
    first: Event,
    /// On those of the others.
    others: Vec<Event>,
}

impl Meeting {
    /// Of a device and the others that run models together with it.
    pub fn new(device: &Device) -> Result<Meeting, DriverError> {
        let others = device.others().iter().map(Device::event).collect::<Result<_, _>>()?;
        Ok(Meeting { first: device.event()?, others })
    }

    /// What is queued from now on on any stream waits for all that was queued on each.
    pub fn meet<'a>(
        &self,
        first: &Stream,
        others: impl Iterator<Item = &'a Stream> + Clone,
    ) -> Result<(), DriverError> {
        for (event, other) in self.others.iter().zip(others.clone()) {
            event.record(other)?;
            first.follow(event)?;
        }
        self.tell(first, others)
    }

    /// What is queued from now on on the other streams waits for what was queued on the first one.
    pub fn tell<'a>(&self, first: &Stream, mut others: impl Iterator<Item = &'a Stream>) -> Result<(), DriverError> {
        self.first.record(first)?;
        others.try_for_each(|other| other.follow(&self.first))
    }

    /// Gives the other devices `count` rows of the tables, from row `row` on, which the sampler has changed on the first one when its stream comes there. Each device
    /// has a stream and its tables.
    pub fn tell_rows<'a>(
        &self,
        first: (&Stream, &LaunchTables),
        others: impl Iterator<Item = (&'a Stream, &'a LaunchTables)> + Clone,
        row: usize,
        count: usize,
    ) -> Result<(), DriverError> {
        if self.others.is_empty() {
            return Ok(());
        }
        self.tell(first.0, others.clone().map(|(stream, _)| stream))?;
        others.into_iter().try_for_each(|(stream, tables)| tables.copy_rows(stream, first.1, row, count))
    }
}

/// Queues the kernels of one launch on all devices. Each waits for the others, so one that cannot be queued ends those that were.
///
/// # Errors
/// What the driver refuses. Nothing of the launch runs then.
pub(super) fn all_or_none(
    all: &[&Watched],
    queue: impl FnOnce() -> Result<(), SessionError>,
) -> Result<(), SessionError> {
    queue().inspect_err(|_| all.iter().for_each(|watched| watched.abandon()))
}

/// One result of a launch on several devices: the longest time, or the fault that says most. A device that hangs takes the others with it,
/// so what they all waited for is one story.
pub(super) fn together(results: impl IntoIterator<Item = Result<f64, SessionError>>) -> Result<f64, SessionError> {
    let mut merged: Result<f64, SessionError> = Ok(0.0);
    for result in results {
        merged = match (merged, result) {
            (Ok(a), Ok(b)) => Ok(a.max(b)),
            (Err(SessionError::Hung { timeout_ms, mut stuck }), Err(SessionError::Hung { stuck: more, .. })) => {
                stuck.extend(more);
                Err(SessionError::Hung { timeout_ms, stuck })
            }
            // A crash explains why the others waited.
            (Err(SessionError::Hung { .. }), Err(other)) => Err(other),
            (Err(first), _) => Err(first),
            (Ok(_), Err(other)) => Err(other),
        };
    }
    merged
}

/// Which device has which bytes of the cache arena: those of a KV head are on the device of its attention.
#[derive(Debug, Default)]
pub(super) struct CacheMap(Vec<(Range<u64>, usize)>);

impl CacheMap {
    pub fn of(schedule: &Schedule) -> CacheMap {
        let (program, mut map) = (&schedule.program, vec![]);
        let Some(regime) = schedule.regimes.first() else { return CacheMap(map) };
        for (task, owner) in regime.tasks.iter().zip(regime.owners()) {
            let grid = &program.grids[task.grid.index()];
            let (Op::Attention(a), Some(owner)) = (&grid.op, owner) else { continue };
            let device = schedule.machine.device_of(owner.index()) as usize;
            let head = u64::from(task.lo / (a.group / a.heads_per_task.max(1)).max(1));
            for role in [Role::AppendK, Role::AppendV] {
                let Some(buffer) = grid.operand(role).map(|operand| operand.buffer.index()) else { continue };
                let bytes = u64::from(cache_row_bytes(a.head_dim, program.precision.cache))
                    * u64::from(program.buffers[buffer].rows);
                let from = schedule.placement[buffer].unwrap_or(0) + head * bytes;
                map.push((from..from + bytes, device));
            }
        }
        map.sort_by_key(|(range, _)| range.start);
        map.dedup();
        CacheMap(map)
    }

    /// The device that has the byte `at`, and how many bytes from there on it has with it; of bytes that no head has, the first device.
    fn find(&self, at: u64) -> (usize, u64) {
        let found = self.0.iter().find(|(range, _)| range.contains(&at));
        let next = self.0.iter().map(|(range, _)| range.start).find(|start| *start > at).unwrap_or(u64::MAX);
        found.map_or((0, next - at), |(range, device)| (*device, range.end - at))
    }

    /// 16-bit values of the cache of all devices, from byte `at` on, each from the device that has it. `streams` has one of each device.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn read(
        &self,
        cache: &DeviceBuffer,
        streams: &[&Stream],
        at: u64,
        bytes: usize,
    ) -> Result<Vec<u16>, DriverError> {
        let (mut values, mut at, end) = (vec![], at, at + bytes as u64 / 2 * 2);
        while at < end {
            let (device, more) = self.find(at);
            let count = (end - at).min(more) as usize / 2;
            values.extend(cache.on(device as u32).download::<u16>(streams[device], at, count)?);
            at += 2 * count as u64;
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::session::Stuck;
    use bytemuck::Zeroable;

    #[test]
    fn each_device_is_told_where_the_others_are() {
        let at = |exchange, logits| Params { exchange, logits, ..Params::zeroed() };
        let each = [at(0x1000, 0x50), at(0x9000, 0x10), at(0x4000, 0x90)];
        let far = distances(&each);
        for (own, far) in each.iter().zip(&far) {
            let found: Vec<u64> = far.peers[..2].iter().map(|n| own.exchange.wrapping_add(*n)).collect();
            let others: Vec<u64> = each.iter().map(|p| p.exchange).filter(|p| *p != own.exchange).collect();
            assert_eq!(found, others);
            assert_eq!(far.peers[2..], [0; 5]);
        }
        assert_eq!(each[1].logits.wrapping_add(far[1].peer_logits[1]), 0x90);
    }

    #[test]
    fn a_crash_explains_why_others_hang() {
        let hung = || Err(SessionError::Hung { timeout_ms: 7, stuck: Vec::<Stuck>::new() });
        assert_eq!(together([Ok(2.0), Ok(3.0)]).unwrap(), 3.0);
        assert!(matches!(together([Ok(1.0), hung()]), Err(SessionError::Hung { .. })));
        assert!(matches!(together([hung(), Err(SessionError::Lost)]), Err(SessionError::Lost)));
        assert!(matches!(together([Err(SessionError::Lost), hung()]), Err(SessionError::Lost)));
    }
}
