//! Owns memory that the device can reach: `DeviceBuffer` and `MappedBuffer`.

use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUdeviceptr};

use super::api::call;
use super::driver::{Context, Device, DriverError};
use super::stream::Stream;

/// Byte that poisons a buffer: all ones is a NaN in fp32, bf16 and fp16, and -1 as an index.
pub const POISON: u8 = 0xff;

/// Device memory. Freed on drop, after the device has finished.
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: CUdeviceptr,
    bytes: u64,
    /// What the other devices have in its place, in their order, if several run a model.
    others: Vec<DeviceBuffer>,
}

impl Device {
    /// Device memory with undefined content, aligned to 256 bytes.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceBuffer, DriverError> {
        let api = self.context.bind()?;
        // The driver refuses 0 bytes; an empty buffer still has an address.
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let mut address = 0;
        // SAFETY: the call writes one address.
        let result = unsafe { call!(api, cuMemAlloc_v2(&mut address, size)) };
        result.map_err(|error| self.context.explain(error, bytes))?;
        Ok(DeviceBuffer { context: self.context.clone(), address, bytes, others: vec![] })
    }

    /// Host memory of `words` 32-bit words, zero, that kernels read and write while they run.
    pub fn alloc_mapped(&self, words: usize) -> Result<MappedBuffer, DriverError> {
        let host = HostBlock::alloc(&self.context, words.saturating_mul(4), CU_MEMHOSTALLOC_DEVICEMAP)?;
        let api = self.context.bind()?;
        let mut address = 0;
        // SAFETY: the block was allocated with `DEVICEMAP`; the call writes one address.
        unsafe { call!(api, cuMemHostGetDevicePointer_v2(&mut address, host.start.as_ptr().cast(), 0)) }?;
        Ok(MappedBuffer { host, address, words })
    }

    /// Page-locked host memory of `bytes` bytes, zero.
    pub(super) fn pinned(&self, bytes: usize) -> Result<HostBlock, DriverError> {
        HostBlock::alloc(&self.context, bytes, 0)
    }
}

impl DeviceBuffer {
    /// Address in device memory, as kernels see it.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn address_ref(&self) -> &u64 {
        &self.address
    }

    /// The same memory, with what the other devices have in its place.
    pub fn with_others(mut self, others: Vec<DeviceBuffer>) -> DeviceBuffer {
        self.others = others;
        self
    }

    /// Devices that have such memory.
    pub fn devices(&self) -> u32 {
        1 + self.others.len() as u32
    }

    /// Those of the other devices.
    pub(super) fn others_mut(&mut self) -> impl Iterator<Item = &mut DeviceBuffer> {
        self.others.iter_mut()
    }

    /// That of a device; 0 is this one.
    pub fn on(&self, device: u32) -> &DeviceBuffer {
        device.checked_sub(1).and_then(|other| self.others.get(other as usize)).unwrap_or(self)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sets every byte to zero, in the order of the stream; returns at once.
    pub fn zero(&mut self, stream: &Stream) -> Result<(), DriverError> {
        self.fill(stream, 0, 0..self.bytes)
    }

    /// The same for the bytes in `range`.
    pub fn zero_range(&mut self, stream: &Stream, range: Range<u64>) -> Result<(), DriverError> {
        self.fill(stream, 0, range)
    }

    /// Sets every byte to `POISON`, so that what a kernel did not write is visible; returns at once.
    pub fn poison(&mut self, stream: &Stream) -> Result<(), DriverError> {
        self.fill(stream, POISON, 0..self.bytes)
    }

    /// The same for the bytes in `range`.
    pub fn poison_range(&mut self, stream: &Stream, range: Range<u64>) -> Result<(), DriverError> {
        self.fill(stream, POISON, range)
    }

    fn fill(&mut self, stream: &Stream, value: u8, Range { start, end }: Range<u64>) -> Result<(), DriverError> {
        assert!(start <= end && end <= self.bytes, "bytes {start} to {end} of a buffer of {}", self.bytes);
        if start == end {
            return Ok(());
        }
        let api = self.context.bind()?;
        // SAFETY: the buffer has these bytes, and the stream is live.
        unsafe { call!(api, cuMemsetD8Async(self.address + start, value, (end - start) as usize, stream.handle())) }
    }

    /// Copies `values` to `offset_bytes`, after the work queued in `stream`, and waits for it.
    ///
    /// For small inputs. Weights go through [`super::staging::Lanes`], which keep the link busy.
    pub fn upload<T: NoUninit>(&mut self, stream: &Stream, offset_bytes: u64, values: &[T]) -> Result<(), DriverError> {
        let values: &[u8] = bytemuck::cast_slice(values);
        let to = self.place(offset_bytes, values.len())?;
        if values.is_empty() {
            return Ok(());
        }
        let api = self.context.bind()?;
        // SAFETY: `place` checked the destination; the source outlives the copy, because the stream is waited for.
        unsafe { call!(api, cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), values.len(), stream.handle())) }?;
        stream.synchronize()
    }

    /// Copies `count` values from `offset_bytes`, after the work queued in `stream`, and waits for it.
    ///
    /// This wait has no deadline: after a launch, call it when `wait_timeout` has seen the end.
    pub fn download<T: AnyBitPattern + NoUninit>(
        &self,
        stream: &Stream,
        offset_bytes: u64,
        count: usize,
    ) -> Result<Vec<T>, DriverError> {
        // Checked before the host allocates: `count` may come from a file.
        let from = self.place(offset_bytes, count.saturating_mul(size_of::<T>()))?;
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        if bytes.is_empty() {
            return Ok(values);
        }
        let api = self.context.bind()?;
        // SAFETY: `place` checked the source; the destination outlives the copy, because the stream is waited for.
        unsafe { call!(api, cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), stream.handle())) }?;
        stream.synchronize()?;
        Ok(values)
    }

    /// Copies `bytes` of another buffer, in the order of the stream; returns at once. The caller keeps `source` until the stream
    /// has done it.
    pub fn copy_from(
        &mut self,
        stream: &Stream,
        to_bytes: u64,
        source: &DeviceBuffer,
        from_bytes: u64,
        bytes: u64,
    ) -> Result<(), DriverError> {
        self.copy_shared(stream, to_bytes, source, from_bytes, bytes)
    }

    /// As [`DeviceBuffer::copy_from`], of memory that kernels share. `source` may be this buffer; the ranges do not overlap.
    ///
    /// # Errors
    /// A range outside of its buffer, or ranges that overlap; what the driver refuses.
    pub(super) fn copy_shared(
        &self,
        stream: &Stream,
        to_bytes: u64,
        source: &DeviceBuffer,
        from_bytes: u64,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (to, from) = (self.place(to_bytes, length)?, source.place(from_bytes, length)?);
        if length == 0 {
            return Ok(());
        }
        if to.abs_diff(from) < bytes {
            let (offset_bytes, range_bytes, buffer_bytes) = (to_bytes, bytes, self.bytes);
            return Err(DriverError::OutOfBounds { offset_bytes, range_bytes, buffer_bytes });
        }
        let api = self.context.bind()?;
        // SAFETY: `place` checked both ranges, and they do not overlap. The device alone reaches this memory.
        unsafe { call!(api, cuMemcpyDtoDAsync_v2(to, from, length, stream.handle())) }
    }

    /// Copies memory of another device, in the order of a stream of this one; returns at once.
    ///
    /// # Errors
    /// A range outside of its buffer; what the driver refuses.
    pub(super) fn copy_from_device(
        &self,
        stream: &Stream,
        source: &DeviceBuffer,
        at_bytes: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let (to, from) = (self.place(at_bytes, bytes)?, source.place(at_bytes, bytes)?);
        let api = self.context.bind()?;
        let (own, other, stream) = (self.context.handle, source.context.handle, stream.handle());
        // SAFETY: `place` checked both ranges, each in memory of its context, which is live. The devices alone reach this memory.
        unsafe { call!(api, cuMemcpyPeerAsync(to, own, from, other, bytes, stream)) }
    }

    /// Address of a range that lies inside the buffer.
    pub(super) fn place(&self, offset_bytes: u64, range_bytes: usize) -> Result<CUdeviceptr, DriverError> {
        let range_bytes = range_bytes as u64;
        let is_inside = offset_bytes.checked_add(range_bytes).is_some_and(|end| end <= self.bytes);
        if !is_inside {
            return Err(DriverError::OutOfBounds { offset_bytes, range_bytes, buffer_bytes: self.bytes });
        }
        Ok(self.address + offset_bytes)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(api) = self.context.bind_to_free() {
            // SAFETY: the address came from `cuMemAlloc`, nothing that knows it runs, and it is freed once.
            let _ = unsafe { call!(api, cuMemFree_v2(self.address)) };
        }
    }
}

/// Page-locked host memory.
pub(super) struct HostBlock {
    context: Arc<Context>,
    pub start: NonNull<u8>,
    pub bytes: usize,
}

// SAFETY: plain memory, owned; `MappedBuffer` reaches it through atomics, `super::staging` through `&mut`.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    fn alloc(context: &Arc<Context>, bytes: usize, flags: u32) -> Result<HostBlock, DriverError> {
        let api = context.bind()?;
        let mut start = ptr::null_mut();
        // SAFETY: the call writes one pointer. Portable: every context sees the memory as page-locked.
        let result = unsafe { call!(api, cuMemHostAlloc(&mut start, bytes.max(1), flags | CU_MEMHOSTALLOC_PORTABLE)) };
        result.map_err(|error| context.explain(error, bytes as u64))?;
        let exhausted = DriverError::OutOfMemory { asked_bytes: bytes as u64, free_bytes: 0 };
        let start = NonNull::new(start.cast()).ok_or(exhausted)?;
        // SAFETY: the block has this many bytes, and no other reference exists. It must not be read before it is written.
        unsafe { start.write_bytes(0, bytes.max(1)) };
        Ok(HostBlock { context: context.clone(), start, bytes })
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(api) = self.context.bind_to_free() {
            // SAFETY: the pointer came from `cuMemHostAlloc`, the device has finished, and it is freed once.
            let _ = unsafe { call!(api, cuMemFreeHost(self.start.as_ptr().cast())) };
        }
    }
}

/// Host memory that kernels read and write while they run: tokens, watchdog reports, the abort word.
///
/// Words are 32 bits, written and read whole by both sides. A word that the host sees was written by the device before
/// the host's load; everything that the device made visible before it with `__threadfence_system` is seen by later loads.
pub struct MappedBuffer {
    host: HostBlock,
    address: CUdeviceptr,
    words: usize,
}

impl MappedBuffer {
    /// Address as kernels see it.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn address_ref(&self) -> &u64 {
        &self.address
    }

    pub fn words(&self) -> usize {
        self.words
    }

    /// Atomics, for the device changes the words at any time: no load may be merged with another or invented.
    fn atomics(&self) -> &[AtomicU32] {
        // SAFETY: the block holds `words` aligned words (pages are aligned), initialised, and lives as long as `self`.
        // Host and device reach them only by whole-word accesses.
        unsafe { std::slice::from_raw_parts(self.host.start.as_ptr().cast::<AtomicU32>(), self.words) }
    }

    fn word(&self, index: usize) -> Result<&AtomicU32, DriverError> {
        self.atomics().get(index).ok_or(DriverError::OutOfBounds {
            offset_bytes: (index as u64).saturating_mul(4),
            range_bytes: 4,
            buffer_bytes: self.words as u64 * 4,
        })
    }

    /// The word at `index` at this moment.
    pub fn load(&self, index: usize) -> Result<u32, DriverError> {
        Ok(self.word(index)?.load(Ordering::Acquire))
    }

    /// Sets the word at `index`; a running kernel sees it with a volatile load.
    pub fn store(&self, index: usize, value: u32) -> Result<(), DriverError> {
        self.word(index)?.store(value, Ordering::Release);
        Ok(())
    }

    /// All words, each at some moment of the call.
    pub fn snapshot(&self) -> Vec<u32> {
        self.atomics().iter().map(|word| word.load(Ordering::Acquire)).collect()
    }

    pub fn fill(&self, value: u32) {
        self.atomics().iter().for_each(|word| word.store(value, Ordering::Release));
    }
}
