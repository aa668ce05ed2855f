//! Owns pinned memory through which bytes go to a device: `Staging` for what a launch reads, `Lanes` for weights.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytemuck::NoUninit;
use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::api::call;
use super::driver::{Device, DriverError};
use super::memory::{DeviceBuffer, HostBlock};
use super::stream::{Event, Stream};

/// More lanes do not upload faster, and each holds pinned memory.
const LANES_MAX: usize = 16;
/// How long a full half is asked about without pause: a launch waits for what goes through it.
const WAIT_SPIN: Duration = Duration::from_micros(50);
/// Sleep between two questions after that: each takes a lock of the driver, which the other lanes need.
const WAIT_SLEEP: Duration = Duration::from_micros(20);

impl Device {
    /// Two pinned halves of `half_bytes` each.
    pub(super) fn staging(&self, half_bytes: usize) -> Result<Staging, DriverError> {
        let half = || -> Result<Half, DriverError> {
            let host = self.pinned(half_bytes.max(1))?;
            Ok(Half { host, left: self.event()?, is_pending: false })
        };
        Ok(Staging { halves: [half()?, half()?], next: 0 })
    }

    /// Lanes for large uploads, with pieces of `piece_bytes`. To an H200, sixteen lanes of 1 and of 4 MiB upload 43 and 48 GB/s of a mapped
    /// file.
    pub fn lanes(&self, piece_bytes: usize) -> Result<Lanes, DriverError> {
        let count = rayon::current_num_threads().min(LANES_MAX);
        Ok(Lanes { lanes: (0..count).map(|_| self.staging(piece_bytes)).collect::<Result<_, _>>()? })
    }
}

/// Pinned memory in two halves: one is filled by the host while the other is on its way to the device.
pub(super) struct Staging {
    halves: [Half; 2],
    next: usize,
}

struct Half {
    host: HostBlock,
    /// The device has read the half; meaningful while `is_pending`.
    left: Event,
    is_pending: bool,
}

impl Half {
    /// The half, once the device has read it.
    fn bytes_mut(&mut self) -> Result<&mut [u8], DriverError> {
        let start = Instant::now();
        while self.is_pending && !self.left.is_done()? {
            if start.elapsed() < WAIT_SPIN { std::hint::spin_loop() } else { std::thread::sleep(WAIT_SLEEP) }
        }
        self.is_pending = false;
        // SAFETY: the block has this many initialised bytes, `&mut self` is exclusive, and no copy is pending.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.host.start.as_ptr(), self.host.bytes) })
    }
}

impl Staging {
    fn half_bytes(&self) -> usize {
        self.halves[0].host.bytes
    }

    /// Copies `values` to `offset_bytes` of `buffer` in the order of the stream, and returns when they are queued. What is larger than a
    /// half goes in pieces.
    ///
    /// # Errors
    /// A range outside of the buffer; what the driver refuses.
    pub fn queue<T: NoUninit>(
        &mut self,
        stream: &Stream,
        buffer: &mut DeviceBuffer,
        offset_bytes: u64,
        values: &[T],
    ) -> Result<(), DriverError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let to = buffer.place(offset_bytes, bytes.len())?;
        let half_bytes = self.half_bytes();
        (to..)
            .step_by(half_bytes)
            .zip(bytes.chunks(half_bytes))
            .try_for_each(|(to, piece)| self.send(stream, to, piece))
    }

    /// Queues one piece, not larger than a half, to a checked address.
    fn send(&mut self, stream: &Stream, to: CUdeviceptr, piece: &[u8]) -> Result<(), DriverError> {
        let half = &mut self.halves[self.next];
        self.next = 1 - self.next;
        half.bytes_mut()?[..piece.len()].copy_from_slice(piece);
        let api = stream.context.bind()?;
        // SAFETY: the caller checked the destination; the half is not written again before its event has passed.
        unsafe { call!(api, cuMemcpyHtoDAsync_v2(to, half.host.start.as_ptr().cast(), piece.len(), stream.handle())) }?;
        half.is_pending = true;
        half.left.record(stream)
    }
}

/// Threads that upload, each through pinned memory of its own: none waits for another one.
pub struct Lanes {
    lanes: Vec<Staging>,
}

impl Lanes {
    /// Copies `bytes` to `offset_bytes` of `buffer`, after the work queued in `stream`, and waits for the end. All lanes read the source,
    /// so that a file mapping is paged in at the speed of the disk.
    ///
    /// # Errors
    /// A range outside of the buffer; what the driver refuses.
    pub fn upload(
        &mut self,
        stream: &Stream,
        buffer: &mut DeviceBuffer,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        let (to, next) = (buffer.place(offset_bytes, bytes.len())?, AtomicUsize::new(0));
        let sent = self.lanes.par_iter_mut().try_for_each(|lane| {
            let piece_bytes = lane.half_bytes();
            loop {
                // All lanes have pieces of one size.
                let at = next.fetch_add(piece_bytes, Ordering::Relaxed);
                let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) else { return Ok(()) };
                lane.send(stream, to + at as u64, &rest[..piece_bytes.min(rest.len())])?;
            }
        });
        // The device may still read what was sent before an error.
        stream.synchronize().and(sent)
    }
}
