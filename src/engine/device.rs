//! Owns the stepper of CUDA targets: kernels for several rows on a device, with the guard of their tables.

use super::stepper::{Bounds, Launch, LaunchRow, Said, Stepper, Want, admit};
use crate::cuda::rows::{FirstToken, RowInput, RowsSession};
use crate::error::Fault;
use crate::rows::Guard;

/// Queues launches on a device. Greedy choice and temperature are the kernel's; every other choice gets logits.
pub struct DeviceStepper {
    /// Ascending by rows, over one cache.
    sessions: Vec<RowsSession>,
    guard: Guard,
    /// Whose launch is queued or runs, and its wants.
    running: usize,
    wants: Vec<Want>,
}

impl DeviceStepper {
    /// A stepper over sessions that nothing was launched on yet, ascending by rows; all have the same cache. A launch runs on the first
    /// one that has as many rows. `None`: there is no session.
    pub fn new(sessions: Vec<RowsSession>) -> Option<DeviceStepper> {
        let guard = Guard::new(*sessions.last()?.shape());
        Some(DeviceStepper { sessions, guard, running: 0, wants: vec![] })
    }
}

impl Stepper for DeviceStepper {
    fn bounds(&self) -> Bounds {
        let largest = &self.sessions[self.sessions.len() - 1];
        let shape = *largest.shape();
        let (vocab, steps_max) = (largest.vocab(), largest.steps_max());
        Bounds { shape, chunk_max: shape.rows, vocab, launches: 1, steps_max }
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        let Launch { rows, steps, edits } = launch;
        self.wants = rows.iter().map(|row| row.want).collect();
        let with_logits = self.wants.contains(&Want::Logits);
        let inputs: Vec<RowInput> = rows.iter().map(|row| input(row, steps)).collect();
        let tables = admit(&mut self.guard, &rows, steps, edits)?;
        let has_room = |session: &RowsSession| session.shape().rows as usize >= rows.len();
        // The guard has judged that the largest has.
        self.running = self.sessions.iter().position(has_room).unwrap_or(self.sessions.len() - 1);
        Ok(self.sessions[self.running].queue(tables, &inputs, with_logits)?)
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let session = &mut self.sessions[self.running];
        let tokens = session.finish()?.tokens;
        let said = (0u32..).zip(&self.wants).map(|(row, want)| {
            Ok(match want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(session.logits(row)?),
                // The first token of a launch was given.
                Want::Token(_) => Said::Tokens(tokens.iter().skip(1).map(|step| step[row as usize]).collect()),
            })
        });
        said.collect()
    }
}

fn input(row: &LaunchRow, steps: u32) -> RowInput {
    let (inverse_temperature, seed) = match row.want {
        Want::Token(sampler) if !sampler.is_greedy() => {
            let [low, high] = sampler.key();
            (sampler.inv_temperature(), u64::from(high) << 32 | u64::from(low))
        }
        _ => (0.0, 0),
    };
    RowInput { first: FirstToken::Given(row.token), steps, inverse_temperature, seed }
}
