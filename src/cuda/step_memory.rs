//! Owns `StepMemory`: what SMs leave for one another in steps of rows, and logits. Both stay in L2 while weights stream through it.
//!
//! A word of a batch kernel is read a microsecond after it was stored, and cleared one step later. In between, weights of many times the size of L2 pass
//! through it. Without a preference the line is written to memory meanwhile, and fetched again: a step of 16 rows of Llama-3.2-1B wrote 14 MB
//! so, while it read weights (`docs/perf-log.md`, entry 39). A launch can name only one range, so both lie in one buffer.

use super::driver::{Device, DriverError};
use super::memory::DeviceBuffer;
use super::stream::{KeptRange, Stream};
use std::ops::Range;

/// Where logits begin: on a cache line of their own.
const ALIGN_BYTES: u64 = 256;

pub(super) struct StepMemory {
    buffer: DeviceBuffer,
    /// Bytes of the exchange, rounded up.
    logits_at: u64,
    /// Bytes that launches ask L2 to keep, from the first one on.
    kept_bytes: u64,
}

impl StepMemory {
    /// Memory for `exchange_bytes` and for `logits` values; the logits are poisoned.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn alloc(
        device: &Device,
        stream: &Stream,
        exchange_bytes: u64,
        logits: u64,
    ) -> Result<StepMemory, DriverError> {
        let logits_at = exchange_bytes.next_multiple_of(ALIGN_BYTES);
        let buffer = device.alloc(logits_at + (logits * 4).max(16))?;
        let kept_bytes = device.context.keep(buffer.bytes())?;
        let mut memory = StepMemory { buffer, logits_at, kept_bytes };
        memory.poison_logits(stream)?;
        Ok(memory)
    }

    /// Device address of the exchange.
    pub fn exchange(&self) -> u64 {
        self.buffer.address()
    }

    /// Device address of the logits.
    pub fn logits(&self) -> u64 {
        self.buffer.address() + self.logits_at
    }

    /// What launches ask L2 to keep, if the device can.
    pub fn kept(&self) -> Option<KeptRange> {
        (self.kept_bytes > 0).then(|| KeptRange { address: self.buffer.address(), bytes: self.kept_bytes })
    }

    /// Zeroes the bytes in `range` of the exchange.
    pub fn zero_exchange(&mut self, stream: &Stream, range: Range<u64>) -> Result<(), DriverError> {
        self.buffer.zero_range(stream, range)
    }

    /// Sets every byte of the exchange to ones: no word is there yet.
    pub fn poison_exchange(&mut self, stream: &Stream) -> Result<(), DriverError> {
        self.buffer.poison_range(stream, 0..self.logits_at)
    }

    /// Sets the bytes in `range` of the exchange to what no kernel writes: words of ones.
    pub fn poison_words(&mut self, stream: &Stream, range: Range<u64>) -> Result<(), DriverError> {
        self.buffer.poison_range(stream, range)
    }

    /// Sets every logit to a value that no kernel writes.
    pub fn poison_logits(&mut self, stream: &Stream) -> Result<(), DriverError> {
        self.buffer.poison_range(stream, self.logits_at..self.buffer.bytes())
    }

    /// `count` packets of the exchange from byte `at` on.
    pub fn read_packets(&self, stream: &Stream, at: u64, count: usize) -> Result<Vec<u64>, DriverError> {
        self.buffer.download(stream, at, count)
    }

    /// `count` words of the exchange from byte `at` on.
    pub fn read_words(&self, stream: &Stream, at: u64, count: usize) -> Result<Vec<u32>, DriverError> {
        self.buffer.download(stream, at, count)
    }

    /// `count` logits from value `first` on.
    pub fn read_logits(&self, stream: &Stream, first: u64, count: usize) -> Result<Vec<f32>, DriverError> {
        self.buffer.download(stream, self.logits_at + first * 4, count)
    }
}
