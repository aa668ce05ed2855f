//! Owns `RowsPeer`: another device of a batch kernel.

use std::sync::Arc;
use std::time::Duration;

use super::driver::Device;
use super::kernel::{Kernel, Part};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::session::SessionError;
use super::step_memory::StepMemory;
use super::stream::Stream;
use super::tables::LaunchTables;
use crate::codegen::abi::{Params, Queues};
use crate::codegen::emit::Trace;

/// Another device than the first one, with a copy of what that one has of a launch.
pub(super) struct RowsPeer {
    pub kernel: Kernel,
    pub memory: StepMemory,
    pub tables: LaunchTables,
}

impl RowsPeer {
    /// Loads the kernel of device `index`, with room for `logits` values and for tables of so many rows and pages. `abort` is the word of the first
    /// device.
    #[expect(clippy::too_many_arguments, reason = "each is what the first device has, too")]
    pub fn load(
        device: &Device,
        index: u32,
        queues: &Queues<'_>,
        cubin: &[u8],
        pack: Arc<DeviceBuffer>,
        abort: Arc<MappedBuffer>,
        logits: u64,
        (rows, pages): (u64, u64),
    ) -> Result<RowsPeer, SessionError> {
        let part = Part { index, abort: Some(abort) };
        let mut kernel = Kernel::load_part(device, queues, cubin, Trace::Off, 1, pack, part)?;
        let stream = &kernel.watched.stream;
        let memory = StepMemory::alloc(device, stream, queues.tables().exchange_bytes, logits)?;
        kernel.watched.shape.kept = memory.kept();
        Ok(RowsPeer { memory, tables: LaunchTables::new(device, 0, rows, pages)?, kernel })
    }

    /// Its stream, and the tables of its launches.
    pub fn tables(&self) -> (&Stream, &LaunchTables) {
        (&self.kernel.watched.stream, &self.tables)
    }

    /// What a launch of the first device passes, for this one. `cache` is that of all devices.
    pub fn params(
        &self,
        first: &Params,
        cache: &DeviceBuffer,
        timeout: Duration,
        eos: &[u32],
    ) -> Result<Params, SessionError> {
        let logits = if first.logits == 0 { 0 } else { self.memory.logits() };
        let own = self.kernel.params_like(first, timeout, eos)?;
        let cache = cache.on(self.kernel.index).address();
        Ok(Params { cache, exchange: self.memory.exchange(), logits, ..own })
    }
}
