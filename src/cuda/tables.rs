//! Owns `LaunchTables`: where launches find their rows and pages on a device, so that the next tables arrive while a launch runs.

use super::driver::{Device, DriverError};
use super::memory::DeviceBuffer;
use super::staging::Staging;
use super::stream::Stream;
use crate::codegen::abi::Row;

/// Each part of the tables begins at a multiple of these bytes.
const ALIGN: usize = 256;
/// Tables of more bytes are waited for.
const STAGED_BYTES: u64 = 64 << 10;
/// Bytes between the counts of two kernels of a launch.
const COUNT_BYTES: u64 = 16;

/// The tables of two launches, used in turn: of one that runs, and of the one that is queued after it.
pub(super) struct LaunchTables {
    /// Copies while a kernel runs on another stream.
    copies: Stream,
    /// Copies in the order of the launches.
    staging: Staging,
    slots: [DeviceBuffer; 2],
    next: usize,
    /// Kernels of a launch that each have a count, which begins at zero.
    counts: usize,
    bytes: Vec<u8>,
}

/// Addresses of the tables of one launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    counts: u64,
    pub rows: u64,
    pub pages: u64,
}

impl Placed {
    /// Where kernel `kernel` of the launch has its count.
    pub fn count(&self, kernel: u32) -> u64 {
        self.counts + u64::from(kernel) * COUNT_BYTES
    }

    /// The tables of kernel `kernel`, whose rows begin at row `first`.
    pub fn of_step(&self, kernel: u32, first: usize) -> Placed {
        Placed { counts: self.count(kernel), ..self.after_rows(first) }
    }

    /// The same tables from row `first` on.
    pub fn after_rows(&self, first: usize) -> Placed {
        Placed { rows: self.rows + (first * size_of::<Row>()) as u64, ..*self }
    }
}

impl LaunchTables {
    /// Room for `rows` rows, `pages` entries of the page table and `counts` counts.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn new(device: &Device, counts: u32, rows: u64, pages: u64) -> Result<LaunchTables, DriverError> {
        let counts = (u64::from(counts) * COUNT_BYTES).next_multiple_of(ALIGN as u64);
        let rows = (rows * size_of::<Row>() as u64).next_multiple_of(ALIGN as u64);
        let slot = || device.alloc(counts + rows + (pages * 4).max(16));
        Ok(LaunchTables {
            copies: device.stream()?,
            staging: device.staging((counts + rows + (pages * 4).max(16)).min(STAGED_BYTES) as usize)?,
            slots: [slot()?, slot()?],
            next: 0,
            counts: counts as usize,
            bytes: vec![],
        })
    }

    /// Copies the tables of a launch, and waits only for the copy. They replace those of the launch two before, which must have ended.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn upload(&mut self, rows: &[Row], pages: &[u32]) -> Result<Placed, DriverError> {
        let (slot, placed) = self.lay_out(rows, pages);
        self.slots[slot].upload(&self.copies, 0, &self.bytes)?;
        Ok(placed)
    }

    /// As [`LaunchTables::upload`], in the order of the stream of the launch; waits for nothing. No other launch is queued.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn queue(&mut self, stream: &Stream, rows: &[Row], pages: &[u32]) -> Result<Placed, DriverError> {
        let (slot, placed) = self.lay_out(rows, pages);
        self.staging.queue(stream, &mut self.slots[slot], 0, &self.bytes)?;
        Ok(placed)
    }

    /// The bytes of the tables, in `bytes`; their slot, and where its parts are.
    fn lay_out(&mut self, rows: &[Row], pages: &[u32]) -> (usize, Placed) {
        self.bytes.clear();
        self.bytes.resize(self.counts, 0);
        self.bytes.extend_from_slice(bytemuck::cast_slice(rows));
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        let at = self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytemuck::cast_slice(pages));
        let slot = self.next;
        self.next = 1 - slot;
        let counts = self.slots[slot].address();
        (slot, Placed { counts, rows: counts + self.counts as u64, pages: counts + at })
    }

    /// Copies rows of the tables that were uploaded last from those of another device, in the order of a stream of this one.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn copy_rows(
        &self,
        stream: &Stream,
        from: &LaunchTables,
        first: usize,
        count: usize,
    ) -> Result<(), DriverError> {
        let (to, from) = (&self.slots[1 - self.next], &from.slots[1 - from.next]);
        let at = (self.counts + first * size_of::<Row>()) as u64;
        to.copy_from_device(stream, from, at, count * size_of::<Row>())
    }
}
