//! Owns `Peer`: another device of a session, whose kernel runs each step together with that of the first one.
//!
//! All memory that the host fills exists once for each device. Kernels store packets and logits to every device at the same places, so a
//! kernel is told how far away the exchange and the logits of each other device are. One abort word ends the kernels of all devices.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::driver::Device;
use super::kernel::{Kernel, Part, poisoned};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::session::SessionError;
use crate::codegen::abi::{DevicesParams, PEERS_MAX, Params, Queues};
use crate::codegen::emit::Trace;
use crate::ir::layout::cache_row_bytes;
use crate::ir::op::{Op, Role};
use crate::ir::schedule::Schedule;

/// Another device than the first one, with a copy of everything that the first one has.
pub(super) struct Peer {
    pub kernel: Kernel,
    pub cache: DeviceBuffer,
    pub exchange: DeviceBuffer,
    pub logits: DeviceBuffer,
    pub prompt: DeviceBuffer,
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
        let (stream, tables) = (&kernel.watched.stream, queues.tables());
        let mut exchange = device.alloc(tables.exchange_bytes.max(16))?;
        exchange.zero(stream)?;
        let context_max = kernel.schedule.program.context_max;
        let peer = Peer {
            cache: poisoned(device, stream, tables.cache_bytes)?,
            logits: poisoned(device, stream, logits_bytes)?,
            prompt: device.alloc(u64::from(context_max) * 4)?,
            exchange,
            kernel,
        };
        peer.kernel.watched.stream.synchronize()?;
        Ok(peer)
    }

    /// What a launch of the first device passes, for this one.
    pub fn params(&self, first: &Params, timeout: Duration, eos: &[u32]) -> Result<Params, SessionError> {
        let own = self.kernel.params(timeout, eos)?;
        Ok(Params {
            pack: own.pack,
            cache: self.cache.address(),
            exchange: self.exchange.address(),
            logits: if first.logits == 0 { 0 } else { self.logits.address() },
            entries: own.entries,
            entry_index: own.entry_index,
            runs: own.runs,
            run_index: own.run_index,
            prompt: self.prompt.address(),
            report: own.report,
            abort: own.abort,
            stamps: own.stamps,
            ..*first
        })
    }
}

/// The parameters of each device: those of every kernel, and where the others are.
pub(super) fn with_peers(each: &[Params]) -> Vec<DevicesParams> {
    let others = |own: usize, at: fn(&Params) -> u64| {
        let mut offsets = [0; PEERS_MAX];
        let others = each.iter().enumerate().filter(|(device, _)| *device != own);
        for (offset, (_, other)) in offsets.iter_mut().zip(others) {
            *offset = at(other).wrapping_sub(at(&each[own]));
        }
        offsets
    };
    let of = |(own, params): (usize, &Params)| DevicesParams {
        params: *params,
        peers: others(own, |params| params.exchange),
        peer_logits: others(own, |params| params.logits),
    };
    each.iter().enumerate().map(of).collect()
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
    pub fn find(&self, at: u64) -> (usize, u64) {
        let found = self.0.iter().find(|(range, _)| range.contains(&at));
        found.map_or((0, u64::MAX), |(range, device)| (*device, range.end - at))
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
        let each = with_peers(&[at(0x1000, 0x50), at(0x9000, 0x10), at(0x4000, 0x90)]);
        for own in &each {
            let of =
                |offsets: &[u64]| offsets[..2].iter().map(|n| own.params.exchange.wrapping_add(*n)).collect::<Vec<_>>();
            let others: Vec<u64> =
                each.iter().map(|p| p.params.exchange).filter(|p| *p != own.params.exchange).collect();
            assert_eq!(of(&own.peers), others);
            assert_eq!(own.peers[2..], [0; 5]);
        }
        assert_eq!(each[1].params.logits.wrapping_add(each[1].peer_logits[1]), 0x90);
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
