//! Owns `StateRows`: where recurrent states lie in the arena of the caches, and the copies between them and to other memory.
//!
//! A copy is queued in the stream of the launch that follows it. It begins after all that was queued there before, and the launch
//! begins after it, so kernels and copies never touch a state at a time.

use super::driver::DriverError;
use super::memory::DeviceBuffer;
use super::stream::Stream;
use crate::ir::layout::{PLACE_ALIGN_BYTES, constant_row_bytes};
use crate::ir::program::Space;
use crate::ir::schedule::Schedule;
use crate::rows::StateCopy;

/// The rows of all states of a sequence, one for each layer that has one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StateRows {
    /// Of each layer: where the row of sequence 0 begins in the arena, and its bytes. The next sequence follows at once.
    layers: Vec<(u64, u64)>,
}

impl StateRows {
    pub fn of(schedule: &Schedule) -> StateRows {
        let buffers = schedule.program.buffers.iter().zip(&schedule.placement);
        let states = buffers.filter(|(buffer, _)| buffer.space == Space::State);
        StateRows { layers: states.filter_map(|(buffer, at)| Some(((*at)?, constant_row_bytes(buffer)))).collect() }
    }

    /// Bytes of the states of one sequence.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Queues copies of states inside the arena `cache`, one after another.
    ///
    /// # Errors
    /// What the driver refuses; a sequence that the arena does not have.
    pub fn copy(&self, stream: &Stream, cache: &DeviceBuffer, copies: &[StateCopy]) -> Result<(), DriverError> {
        for StateCopy { from, to } in copies {
            for &(at, bytes) in &self.layers {
                let row = |sequence: u32| at + u64::from(sequence) * bytes;
                cache.copy_shared(stream, row(to.0), cache, row(from.0), bytes)?;
            }
        }
        Ok(())
    }

    /// Queues the copy of the states of sequence 0, from the arena `cache` to `kept`, which has [`StateRows::kept_bytes`].
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn save(&self, stream: &Stream, cache: &DeviceBuffer, kept: &DeviceBuffer) -> Result<(), DriverError> {
        self.packed().into_iter().try_for_each(|(place, at, bytes)| kept.copy_shared(stream, place, cache, at, bytes))
    }

    /// Queues the copy back.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn restore(&self, stream: &Stream, cache: &DeviceBuffer, kept: &DeviceBuffer) -> Result<(), DriverError> {
        self.packed().into_iter().try_for_each(|(place, at, bytes)| cache.copy_shared(stream, at, kept, place, bytes))
    }

    /// Bytes outside of the arena for the states of sequence 0: what lies between two that are copied as one has a place, too.
    pub fn kept_bytes(&self) -> u64 {
        self.packed().last().map_or(0, |(place, _, bytes)| place + bytes)
    }

    /// The place of each layer's state outside of the arena, one after another; its place in the arena, and its bytes. States that lie side by
    /// side are one, with the unused bytes between them: each copy takes the host some microseconds. So few bytes are no state of another sequence.
    fn packed(&self) -> Vec<(u64, u64, u64)> {
        let mut packed: Vec<(u64, u64, u64)> = vec![];
        for &(at, bytes) in &self.layers {
            let place = packed.last().map_or(0, |(place, _, bytes)| place + bytes);
            let is_adjacent = |&(_, before, length): &(u64, u64, u64)| {
                at.checked_sub(before + length).is_some_and(|unused| unused < PLACE_ALIGN_BYTES.min(bytes))
            };
            match packed.last_mut().filter(|last| is_adjacent(last)) {
                Some((_, before, length)) => *length = at + bytes - *before,
                None => packed.push((place, at, bytes)),
            }
        }
        packed
    }
}
